"""What a replay counts, reports and records."""
