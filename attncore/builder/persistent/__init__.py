"""The persistent builder: a batch kept from step to step, and the metadata of each step built from it."""
