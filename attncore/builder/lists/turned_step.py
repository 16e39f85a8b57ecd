"""The step after one with prompts, when every row has become a decode of one token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.arguments import own_items
from attncore.builder.fields import ARRAYS
from attncore.builder.lists import error_texts
from attncore.builder.lists.sequence_group import Sequence, SequenceGroup

if TYPE_CHECKING:
    from attncore.builder.metadata import CommonAttentionMetadata


def turned_step(metadata: CommonAttentionMetadata) -> dict[str, Any]:
    """The attributes of ``metadata`` one token later, built from its groups' tables as they are now; not planned.

    The caller is inside the builder. Raises ValueError for a profiling run and for a row without a block for its token;
    ``metadata`` is not changed.
    """
    if metadata.source is None:  # advance_step has refused it
        raise ValueError("metadata: not as CommonMetadataBuilder.build gave it")
    if metadata.is_profile_run:
        raise ValueError("metadata: of a profiling run, without blocks; only built steps of sequences advance")
    lengths = (metadata.host.context_lens + metadata.host.query_lens).tolist()
    groups = _longer_groups(metadata.source.groups, lengths)
    longer: dict[str, Any] = vars(metadata.source.builder.build_unplanned(groups))
    longer["advanced"] = metadata.advanced + 1
    held = vars(metadata)
    engines = (name for name in held if name not in ARRAYS and not name.startswith("_"))
    return {name: held[name] for name in engines} | longer


def _longer_groups(groups: Any, lengths: list[int]) -> list[SequenceGroup]:
    """The groups of a step of decodes that follow sequences of ``lengths`` tokens; the tables are the same objects."""
    made, row = [], 0
    for group in groups:
        sequences = []
        for sequence in own_items(group[1]):
            if not isinstance(sequence, tuple) or len(sequence) < 4 or row == len(lengths):
                raise error_texts.changed_groups()
            sequences.append(Sequence(sequence[0], 1, lengths[row], sequence[3]))
            row += 1
        made.append(SequenceGroup(False, sequences, False, *group[3:5]))  # no token that is sampled is a placeholder
    if row != len(lengths):
        raise error_texts.changed_groups()
    return made
