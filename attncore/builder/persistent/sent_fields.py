"""Which fields every step is sent to the device with: what the backends declare, and what others are known to read."""

from __future__ import annotations

from attncore.builder.fields import FIELDS, Owner
from attncore.builder.persistent.group_backends import Backends

OF_ENGINES = ("positions", "logits_indices", "slot_mapping")
"""What engines read of every step: rotary embeddings, the sampler, and writes to a cache of their own."""

OF_STATES = ("context_lens", "query_start_loc")
"""What the layers of a group of states read of every step, beside their slots."""

_STARTS = ("query_start_loc", "seq_start_loc")


def sent_fields(backends: Backends, has_cross: bool, overlaps: bool, has_states: bool) -> frozenset[str] | None:
    """The names of these fields; None, which is all, where a group has no backend or its backend no spec.

    A batch with a cross group is sent the encoder's fields, one with groups of states what their layers read,
    ``overlaps`` what is corrected on the device. The fields of an engine (``register_field``), and the slots of states,
    are not among them: they are sent with every step.
    """
    declared: set[str] = set()
    for backend in backends.by_group.values():
        if backend is None or backend.spec is None:
            return None
        declared.update(backend.spec.device_needs)
    names = declared.union(OF_ENGINES)
    names.update(f"prefill_{name}" for name in _STARTS if name in declared)  # that of prefill_metadata
    if "paged_kv_indices" in declared or "paged_kv_num_pages" in declared:
        names.add("paged_kv_indptr")
    if has_cross:
        names.update(name for name, field in FIELDS.items() if field.owner is Owner.ENCODER)
    if has_states:
        names.update(OF_STATES)
    if overlaps:
        from attncore.builder.device.corrections import NEEDED

        names.update(NEEDED)
    return frozenset(names)
