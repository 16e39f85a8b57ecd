"""Which requests run in a step, in which blocks, and what a step costs in virtual time.

``scheduler`` turns requests into ``running_request`` objects and plans each ``step``; it takes their blocks from
``kv_cache_manager``, which has a ``block_pool`` for each KV-cache group, and their drafts from ``draft_model``.
``cost_model`` is the cost of a step.
"""
