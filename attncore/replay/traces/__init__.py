"""Request traces: files in two formats, and a synthetic workload."""
