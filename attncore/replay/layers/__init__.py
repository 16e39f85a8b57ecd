"""What runs on a step's metadata: attention layers or a whole model, each with ``forward`` and ``check``.

``make_layers`` chooses the backends of a run and makes ``attention_layers``, or ``context_parallel_layers`` for context
parallelism. ``whole_model`` makes a model of transformers from a configuration file.
"""
