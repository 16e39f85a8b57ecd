"""What a third party's tests are made of: the conformance kit, the latency suite, and ``verify``'s comparison.

A backend's test file is two lines::

    from attncore.testing.suite import *
    BACKEND = "acme"

``python -m attncore.testing acme`` runs the same without a file. docs/conformance.md says what is checked.
"""
