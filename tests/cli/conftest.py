"""The fixtures of planting.py and replay_command.py."""

from planting import site
from replay_command import trace

__all__ = ["site", "trace"]
