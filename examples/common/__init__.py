"""What the demo and the study share: command lines, worker processes, batches, metrics, tables, figures."""
