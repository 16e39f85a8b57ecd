"""How much of a file of saved steps is read; imports nothing."""

MAX_BYTES = 1 << 30
"""Of the file."""
MAX_DEPTH = 16
"""Levels of a line of it."""
