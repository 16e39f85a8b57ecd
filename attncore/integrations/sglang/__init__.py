"""attncore's backends as attention backends of SGLang: ``attncore``, and ``attncore_<name>`` for each installed one.

SGLang finds ``register`` by its entry point and calls it in each of its processes.

- ``register``: the names, and which SGLang they are for.
- ``attention_backend``: what SGLang calls in each step.
- ``choose_backends``: backends for the layers of a model; ``engine_facts`` reads them, and what SGLang is run with, and
  refuses what cannot run.
- ``step_tensors``: the tensors of a step, as ``AdoptedSteps`` takes them.

Importing this package imports neither torch nor SGLang.
"""
