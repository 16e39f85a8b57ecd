"""The modules of attncore that others may import from; what is public in them is what their ``__all__`` names."""

PUBLIC_MODULES = {
    "attncore", "attncore.builder", "attncore.dense", "attncore.graphs", "attncore.kept_files", "attncore.merge",
    "attncore.ops", "attncore.ops.cache_writer_triton", "attncore.ranks", "attncore.reference", "attncore.testing",
    "attncore.testing.latency", "attncore.testing.suite",
}  # fmt: skip
"""Those that plugins, too, may import from."""
