"""The machine: its devices, its packages, and how they are found out."""
