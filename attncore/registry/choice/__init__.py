"""Choosing a backend for a request on a host, from judging each candidate to creating the one chosen.

- ``select``: ``select``, ``select_joint`` and ``select_for_layers``, what an engine calls: a choice, or NoBackendError.
- ``negotiate_installed``: a negotiation among the plugins of this process, with ATTNCORE_BACKEND.
- ``layers_choice``, ``prefill_decode_choice``, ``choice``: what an engine gets; ``create_backend`` imports the plugin's
  library.
- ``show``: a choice as text and as HTML.
- ``explain``: a negotiation in words.
- ``capability_matrix``: what all backends have, as Markdown.
- ``installed``: ``attncore.backends``, what is installed and what of it runs here.
- ``runs_here``: whether a backend can run on a host at all.
- ``negotiate_layers``, ``negotiate_prefill_decode``, ``negotiate``: the candidates in order and the one chosen, for the
  kinds of layers of a model, for two phases, and for one request.
- ``candidates``: every backend with all reasons against it; ``fitting_variant``: which of its variants fits.
- ``reasons_against``: the reasons against one spec.
- ``cache_format``: the block sizes and layouts that a spec and a request have in common.

Each imports only from those after it. From ``candidates`` to ``negotiate_prefill_decode`` all are pure functions of
request, host and records; a result goes up: reasons, candidates, Negotiation, Choice.
"""
