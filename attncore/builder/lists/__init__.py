"""The list builder: metadata from groups of sequences, one step at a time.

``sequence_group`` is what an engine passes, ``builder`` builds a step from it by the rules of a dialect
(``dialects``), with the fields of ``encoders``; ``error_texts`` has the texts of errors. ``advance_step`` moves a
built step on by one token, on a device by the kernel of ``triton_advance``. For captured graphs, ``capture_state`` is
the engine's interface, ``captured_steps`` what was captured, and ``graph_buffers`` the arrays at fixed addresses.
"""
