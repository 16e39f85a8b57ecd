"""What a replay runs: attention layers, or a whole model."""
