"""Choosing a backend: a request, the constraints on it, negotiation, and the choice with its reasons."""
