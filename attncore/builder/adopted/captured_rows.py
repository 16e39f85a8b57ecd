"""The captured sizes of adopted steps: what a graph was captured over, which later steps of the size must still be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attncore.builder.adopted.given import Given
from attncore.errors import CaptureError
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.adopted.given import Place
    from attncore.builder.adopted.settings import Facts, Settings


class Captured(NamedTuple):
    """A captured size: tokens of each row, and where the engine's tensors lay; None until the first step of it."""

    query_len: int
    addresses: tuple[int, ...] | None
    plans_itself: bool = False
    """Whether its graph plans each step on the device."""
    row_stride: int = 0
    """That of the engine's block table."""
    made: frozenset[str] = frozenset()
    """The fields on the device that its graph makes."""


class CapturedRows:
    """The captured sizes by their number of rows."""

    def __init__(self, facts: Facts, settings: Settings) -> None:
        self._facts, self._settings = facts, settings
        self._sizes: dict[int, Captured] = {}

    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows, ascending."""
        return tuple(sorted(self._sizes))

    def get(self, num_reqs: int) -> Captured | None:
        """The size of so many rows; None where it was not captured."""
        return self._sizes.get(num_reqs)

    def register(self, num_reqs: int, query_len: int) -> None:
        """Makes a size a captured one; ValueError where it cannot be captured."""
        self._check(num_reqs, query_len)
        self._sizes.setdefault(num_reqs, Captured(query_len, None))

    def release(self, num_reqs: int) -> None:
        """Makes a size no captured one; CaptureError where it is none."""
        if num_reqs not in self._sizes:
            known = ", ".join(map(str, self.sizes())) or "none"
            raise CaptureError(f"num_reqs: {num_reqs} was not captured (captured: {known}); release what was")
        del self._sizes[num_reqs]

    def new(self, place: Place) -> Captured:
        """The size of a step that a graph is to be captured over; ``keep`` makes it a captured one."""
        num_rows, num_slots = place.num_reqs, place.num_slots
        query_len = num_slots // num_rows if num_rows else 0
        if not query_len or query_len * num_rows != num_slots:
            raise ValueError(
                f"capturing: {counted(num_slots, 'slot')} found for {counted(num_rows, 'row')}; a graph is captured "
                "over rows of one length, so give each row as many"
            )
        self._check(num_rows, query_len)
        return Captured(query_len, None)

    def keep(self, captured: Captured, place: Place) -> None:
        """Makes a size, whose first step has been built, a captured one of tensors in this place."""
        self._sizes[place.num_reqs] = captured._replace(addresses=place.addresses, row_stride=place.table_stride[0])

    def recorded(self, num_reqs: int, *, plans_itself: bool, made: frozenset[str] = frozenset()) -> None:
        """Says what the graph of a size does by itself; nothing of a size that was released since."""
        if num_reqs in self._sizes:
            self._sizes[num_reqs] = self._sizes[num_reqs]._replace(plans_itself=plans_itself, made=made)

    def settle_counts(self, counts: dict[str, int], captured: Captured, place: Place) -> None:
        """Gives the first step of a size the largest possible lengths; of a later one, CaptureError where the engine's
        tensors lie elsewhere than its graph reads them.
        """
        if captured.addresses is None:
            most = min(self._settings.max_model_len, place.table_shape[1] * self._settings.block_size)
            counts.update(max_seq_len=most, max_decode_seq_len=most, max_query_len=captured.query_len)
        elif captured.addresses != place.addresses:
            pairs = zip(Given._fields, captured.addresses, place.addresses, strict=True)
            name, rows = next(name for name, before, now in pairs if before != now), place.num_reqs
            raise CaptureError(
                f"{name}: it lies elsewhere than at the capture of {counted(rows, 'row')}, and the graph reads it "
                f"there; write to that tensor, or call release({rows}) when the graph is gone"
            )
        elif captured.row_stride != place.table_stride[0]:
            raise CaptureError(
                f"block_table: rows of stride {place.table_stride[0]} found, and the graph of "
                f"{counted(place.num_reqs, 'row')} reads them {captured.row_stride} apart; give the view that was "
                "captured over"
            )

    def _check(self, num_reqs: int, query_len: int) -> None:
        facts, settings, known = self._facts, self._settings, self._sizes.get(num_reqs)
        if known is not None and known.query_len != query_len:
            raise ValueError(
                f"query_len: the size of {counted(num_reqs, 'request')} was captured with "
                f"{counted(known.query_len, 'token')} each, not {query_len}; "
                f"call release({num_reqs}) when that graph is gone"
            )
        if facts.cuda_graph == "never":
            raise ValueError(f"num_reqs: backend {facts.name!r} cannot be captured in a graph; run its steps without")
        if query_len > 1 and facts.cuda_graph == "uniform_decode":
            raise ValueError(f"query_len: {query_len}, but backend {facts.name!r} captures decodes of one token only")
        if query_len > settings.decode_threshold:
            raise ValueError(
                f"query_len: {query_len} is above decode_threshold {settings.decode_threshold}; graphs hold decodes "
                "only"
            )
        if num_reqs > settings.max_num_reqs:
            raise ValueError(f"num_reqs: {num_reqs} exceed max_num_reqs {settings.max_num_reqs}")
        if num_reqs * query_len > settings.max_num_tokens:
            raise ValueError(
                f"num_reqs: {num_reqs} of {counted(query_len, 'token')} exceed max_num_tokens {settings.max_num_tokens}"
            )
