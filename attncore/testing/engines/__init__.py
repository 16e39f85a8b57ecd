"""Small engines that run steps of one layer through the backend under test and compare what it gives.

``engine`` runs decoder layers by either builder; ``encoder_engine``, ``cross_engine`` and ``captured_engine`` are its
kinds for encoders, for cross attention and for captured graphs. An engine is made of ``requests`` (a batch, a pool of
blocks, histories), ``random_tensors`` (queries, keys, values) and a ``cache_view`` (the cache by slots, over
``blocks_first`` and ``cache_element_owners``). A step goes from a builder through ``steps_on_device`` to the layer; its
output, log-sum-exp and cache go to ``compare``, within ``tolerances``. ``run_batches`` runs whole batches through an
engine. ``timed_steps`` makes steps to be timed; ``saved_steps`` reads a file of them.
"""
