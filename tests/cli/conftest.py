"""The fixtures of planting.py, replay_command.py and screens.py."""

from cli.screens import screen
from planting import site
from replay_command import trace

__all__ = ["screen", "site", "trace"]
