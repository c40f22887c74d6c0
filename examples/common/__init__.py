"""Shared by the examples: command lines, workers, records, batches, metrics, tables, figures, and a toy."""
