"""The tests of the conformance kit, a file for each row of the support table or for a few that belong together.

The plugin: ``spec``, ``declared_sizes``, ``refusals``. The cache: ``kv_cache``, ``nan_canary``. Numbers: ``numerics``,
``strided_tensors``, ``features``, ``dtypes_and_layouts``, ``scales``, ``sinks``, ``latent_attention``, ``encoders``,
``cross_attention``, ``log_sum_exp``. Steps: ``stale_state``, ``padding``, ``list_builder``. Ways to run a layer:
``torch_operator``, ``captured_sizes``, ``torch_graph``, ``synchronisation``.

Each test takes the fixture ``attncore_subject``, runs an engine of ``attncore.testing.engines`` and raises
ConformanceError or UnsupportedError.
"""
