"""Training loops to run and to copy from; each file says how to run it."""
