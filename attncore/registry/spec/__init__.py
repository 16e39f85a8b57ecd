"""What a backend declares: its spec, and the kinds of values that a spec holds."""
