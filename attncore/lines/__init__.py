"""JSON Lines: batches and steps in, metadata out, one a line (``attncore build``)."""
