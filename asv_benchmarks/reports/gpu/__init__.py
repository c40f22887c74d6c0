"""``make bench-gpu``: the kernels on an NVIDIA GPU, in parts that know nothing of each other.

Each part is a module that prints Markdown and ends with the exit code 1 if a number was wrong. They need
torch, Triton, pytest and hypothesis, and use CuPy and compute-sanitizer where these are there.
"""
