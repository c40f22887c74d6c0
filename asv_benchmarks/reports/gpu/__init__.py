"""``make bench-gpu``: projections on an NVIDIA GPU, in parts that know nothing of each other.

Each part is a module that prints Markdown and ends with the exit code 1 if a number was wrong. They need
torch, pytest and hypothesis, and use CuPy and quadprog where these are there.
"""
