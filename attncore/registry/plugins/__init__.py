"""Installed plugins: finding them, loading them safely, and examining one in a process of its own."""
