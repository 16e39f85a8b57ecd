"""Tests for authors of backends: the conformance kit, the latency suite, and ``attncore verify``'s comparison.

A backend's test file is two lines::

    from attncore.testing.suite import *
    BACKEND = "acme"

``python -m attncore.testing acme`` runs the same without a file: ``run_apart`` in another process, ``kit_child``, which
a backend may crash. docs/conformance.md says what is checked.

``suite`` collects the tests of ``checks``, by rows of the support table; they run steps through the small ``engines``,
and stand on the ``harness``: the backend under test, pytest's fixtures and plugin, the support table. ``latency`` times
a backend's steps. ``verify`` asks ``verify_child``, in another process, whether a backend agrees with ``reference``.
"""
