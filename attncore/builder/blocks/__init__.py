"""Building blocks for engines that do more with a step: host arithmetic on metadata and its arrays.

Before a build: ``splitting`` orders and classifies requests, ``kernel_blocks`` expands block ids, ``placeholder_map``
maps tokens to embeddings. On a built step: ``microbatches`` slices it, ``cascade`` splits off a shared prefix,
``chunked_context`` splits long contexts, ``local_attention`` makes virtual batches of chunks, ``context_parallel``
takes one rank's share, ``rank_steps`` has it in forms that any backend runs; ``check_whole_requests`` checks that a
step suits them.
"""
