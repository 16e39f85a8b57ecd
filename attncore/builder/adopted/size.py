"""What adopted steps of one number of rows share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncore.builder.adopted.given import Given, Place
from attncore.builder.adopted.step import OF_STARTS
from attncore.builder.device.memory import zeros

if TYPE_CHECKING:
    from attncore.builder.adopted.device_fields import DeviceFields

_OF_LENGTHS = ("seq_lens", "context_lens", "seq_start_loc", "paged_kv_indptr", "paged_kv_last_page_len")
_ONE_LONGER = ("query_start_loc", "seq_start_loc", "paged_kv_indptr", "_starts")


class Size:
    """What steps of one number of rows have in common: views of our memory, and of the engine's of last time."""

    __slots__ = ("device", "facts", "given", "host", "kept", "key", "known", "num_reqs", "prepared", "values")

    def __init__(self, num_reqs: int, device: dict[str, Any], arrays: list[dict[str, Any]]) -> None:
        self.num_reqs, self.device = num_reqs, device
        self.host = [
            {name: of_step[name][: num_reqs + (name in _ONE_LONGER)] for name in (*OF_STARTS, *_OF_LENGTHS)}
            for of_step in arrays
        ]
        self.kept: Any = None
        """Aliases of the engine's tensors, which keep their memory: a tensor that lies there later shares it."""
        self.given: Any = None
        """The tensors of metadata: ``kept``, but lengths of ours where padded rows are lent keys."""
        self.values: dict[str, Any] = {}
        """What metadata of ``given`` has beside a step's own."""
        self.key: Any = None
        """Where the engine's tensors lay, and what else tells ``given``."""
        self.known: Any = None
        """What finds steps of ``facts`` in one call; None where nothing does."""
        self.prepared: Any = None
        """What makes the fields of known steps on the device in one launch; None where more has to be done."""
        self.facts: Any = None
        """``facts_of_tensors`` of the engine's; None where ``key`` is none, or a tensor has no address."""


class Sizes:
    """The sizes of AdoptedSteps. ``values``: what metadata of all of them has."""

    def __init__(
        self,
        fields: DeviceFields,
        arrays: list[dict[str, Any]],
        *,
        page_list: bool,
        lends: bool,
        values: dict[str, Any],
    ) -> None:
        self._fields, self._arrays, self._page_list, self._lends, self.values = (
            fields,
            arrays,
            page_list,
            lends,
            values,
        )
        self.by_rows: dict[int, Size] = {}
        self._found: dict[int, Size] = {}
        """By the rows that an engine gave, padding counted: the size of the last such step."""

    def find(self, facts: tuple[Any, ...] | None) -> Size | None:
        """The size of tensors of these facts, where it keeps tensors in their place; None elsewhere."""
        if facts is None or not facts[5]:  # the shape of seq_lens
            return None
        size = self._found.get(facts[5][0])
        return size if size is not None and size.facts == facts and size.kept.lies_at(facts) else None

    def of_step(
        self, tensors: tuple[Any, ...], place: Place, counts: dict[str, Any], facts: Any, known: Size | None
    ) -> Size:
        """The size of a step, which keeps the tensors of its metadata.

        ``known``: that of the engine's rows, where it keeps tensors in this place.
        """
        num_reqs, num_tokens = counts["num_reqs"], counts["num_tokens"]
        lends = self._lends and counts["use_cuda_graph"]
        if known is not None and known.num_reqs == num_reqs and known.key[1] == num_tokens and known.key[2] == lends:
            return known  # the same tensors: what is kept by them, such as a plan, is found again
        size = self.by_rows.get(num_reqs)
        if size is None:
            size = self.by_rows[num_reqs] = Size(num_reqs, self._fields.sums(num_reqs), self._arrays)
        self._set_given(size, Given(*tensors).cut(num_reqs, num_tokens), (place, num_tokens, lends), facts)
        self._found[place.num_reqs] = size
        return size

    def _set_given(self, size: Size, given: Given, key: tuple[Place, int, bool], facts: Any) -> None:
        """Has ``size`` keep the tensors of metadata, for this step and later ones, for the engine's ``given``."""
        place, _, lends = key
        before = size.key
        size.facts = size.key = None  # an interrupted call leaves none, facts first
        if size.known is not None:
            size.known.forget()
        kept = given.alias()
        if (
            before is not None
            and (before[0].rows, before[2]) == (place.rows, lends)
            and size.kept.lies_at(place._replace(slots=size.kept.slot_mapping.data_ptr()))
        ):
            kept, given = size.kept._replace(slot_mapping=kept.slot_mapping), size.given
            given = given._replace(slot_mapping=kept.slot_mapping)
        else:
            given = kept._replace(seq_lens=self._fields.other("seq_lens", kept)) if lends else kept
        size.kept, size.given = kept, given
        size.values = {
            **(size.device if self._page_list else {}), **given._asdict(), "_given": given, "_engines": kept,
            **self.values,
        }  # fmt: skip
        size.key = key
        size.facts = facts if all(facts[:4]) else None  # without elements a tensor may be on any device


def new_arrays(max_num_reqs: int) -> dict[str, Any]:
    """Host memory of one step, which ``AdoptedRows`` fills."""
    names = (*OF_STARTS, *_OF_LENGTHS, "_starts", "_lengths")
    return {name: zeros(max_num_reqs + (name in _ONE_LONGER), np.int32) for name in names}
