"""``make bench-gpu``: projections on an NVIDIA GPU, in independent parts.

Each part is a module whose `main` prints Markdown and returns 1 if a number was wrong. The parts need torch,
pytest and hypothesis, and use CuPy and quadprog if they are installed.
"""
