"""Shared by the examples: command lines, workers, records of runs, batches, metrics, tables, figures; a toy."""
