"""What a replay compares: metadata with an oracle, attention with dense attention."""
