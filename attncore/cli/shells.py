"""The shells whose completion can be printed; what prints it is not loaded for their names."""

SHELLS = ("bash", "zsh", "fish", "tcsh")
"""A release of ``shtab`` may know others, or fewer."""
