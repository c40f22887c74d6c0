"""Teach a chat model something new, with a bound on how far it may drift from what it says."""
