"""The list builder: metadata from groups of sequences, handed over one step at a time."""
