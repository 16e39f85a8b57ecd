"""The fixture of planting.py."""

from planting import site

__all__ = ["site"]
