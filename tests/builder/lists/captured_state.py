"""Steps of decodes, and a state of the list builder with captured sizes, for the tests of CommonAttentionState."""

from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.builder.lists.capture_state import CommonAttentionState


def decodes(rows):
    return [SequenceGroup(False, [Sequence(i, 1, context, table)]) for i, (context, table) in enumerate(rows)]


def made(layout="common", capture=16, sizes=(1, 2, 4), backend=None, **options):
    """(builder, state) with these sizes captured."""
    builder = CommonMetadataBuilder(4, layout, max_seq_len_to_capture=capture, backend=backend, **options)
    state = CommonAttentionState(backend, builder)
    with state.graph_capture(max(sizes)):
        for size in sizes:
            state.metadata_for_capture(size)
    return builder, state
