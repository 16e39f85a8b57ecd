"""Every attncore backend inside vLLM: one attention backend of vLLM for each, by names such as ATTNCORE_FLASHINFER.

vLLM calls ``registration.register`` by itself in each of its processes (entry-point group ``vllm.general_plugins``).
docs/engines.md says how it is used, docs/design/bridges.md why it is as it is.

- ``registration``: what vLLM calls at its start; ``names``: the names, and how they reach spawned processes.
- ``backend_classes``: the classes that the names stand for, made when vLLM asks for them.
- ``attention_backend``, ``metadata_builder``, ``layer``: vLLM's three interfaces.
- ``model_request``: what vLLM's configuration asks of a backend; ``refusals``: what the bridge does not run, and why.
- ``settings``: the user's options; ``versions``: the versions of vLLM that this bridge was written for.

Importing this package imports neither vLLM nor torch.
"""
