"""Shared by the demo and the study: command lines, worker processes, batches, metrics, tables, figures."""
