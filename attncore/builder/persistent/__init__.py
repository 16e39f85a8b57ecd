"""The persistent builder: a batch kept from step to step, and the metadata of each step built from it.

``input_batch`` is the batch; ``batch_arguments`` checks what it is given, and ``batch_core`` is its state, which
``block_table`` (for each ``kv_cache_group``) and ``request_rows`` make up. ``builder`` builds steps from it:
``settings``, ``group_backends``, ``engine_fields`` and ``overlap`` say how, ``assembly`` takes a step through its
stages in a shape of ``step_shapes``, and ``new_step_metadata`` makes the ``step_metadata`` over ``host_fields``.
``error_texts`` has the texts of errors, ``poison`` finds late access, ``profiling_run`` makes the metadata of a
profiling run.
"""
