"""Attention over keys that the ranks of torch.distributed share out: each attends over its part, and all merge.

- ``backend``: a backend whose layers do so.
- ``exchange``: one collective for a layer's outputs and log-sum-exps.
- ``merge_kernel``: what came from all ranks merged in one launch.

Each imports only from those after it. ``attncore.builder.ContextParallel`` says which rank keeps which token.
"""

from __future__ import annotations

from attncore.ranks.backend import over_ranks

__all__ = ["over_ranks"]
