"""The plugin's Triton kernels: no vendor intrinsics, the same source for every architecture."""
