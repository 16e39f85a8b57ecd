"""CommonAttentionMetadata: the arrays and counts of a step, and its views.

``step_arrays.StepArrays`` describes the arrays, ``fields.FIELDS`` says how they are handled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt

from attncore.builder import slices
from attncore.builder.fields import (
    ARRAYS,
    BROADCAST,
    COUNTS,
    DERIVED,
    FIELDS,
    names_to_skip,
    no_such_field,
)
from attncore.builder.first_generation_names import FirstGenerationMetadataNames
from attncore.builder.grid import step_grid, step_html
from attncore.builder.read_only import read_only
from attncore.builder.show import metadata_text
from attncore.show import guarded, guarded_html

if TYPE_CHECKING:
    from attncore.step_arrays import StepArrays

    _Arrays = StepArrays[Any, Any]
    _HostArrays = StepArrays[npt.NDArray[np.int64], npt.NDArray[np.int32]]
else:  # a Protocol among the bases would make isinstance slow, and has nothing at run time
    _Arrays = object

OF_ARRAYS = ("_bound", "_kept", *DERIVED)
"""What metadata keeps that was made of a step's arrays: with other arrays it is dropped."""

OF_VIEWS = ("_taken_of", "_of_rank")
"""What a view has from the view, or from the metadata of one rank, that it is taken of."""

Wrap = Callable[[npt.NDArray[Any]], Any]
"""What makes a field of a host array that is the builder's own: ``from_host`` of a backend, or ``read_only``."""


class Source(NamedTuple):
    """What the list builder made a step from; ``advance_step`` reads the whole tables from it."""

    builder: Any
    """The CommonMetadataBuilder."""
    groups: Any
    """The groups that it was given."""
    num_ids: int
    """Block ids that their tables had in all."""
    host: Any
    """The step's host arrays."""


class CommonAttentionMetadata(FirstGenerationMetadataNames, _Arrays):
    """The metadata of one step of T tokens and n requests, including the rows that a graph's padding adds.

    Arrays are torch tensors on the backend's device, or NumPy arrays without a backend; ``host`` has the same fields as
    NumPy arrays, without a copy. NumPy arrays are read-only; tensors on a CPU share their memory, and must not be
    written to. A field that the builder does not make raises AttributeError, and so do the fields of encoders and of
    cross attention in a step without encoder input.

    ``copy.copy`` of a step of the list builder has arrays of its own, as they are, and cannot advance; that of another
    step is a second view of its arrays.
    """

    host: _HostArrays
    _wrap: Wrap
    # counts: plain ints
    num_reqs: int
    num_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    max_query_len: int
    max_seq_len: int
    max_prefill_seq_len: int
    max_decode_seq_len: int
    max_decode_query_len: int
    """1 in a step without decodes."""
    use_cuda_graph: bool
    """Whether the step was padded for a captured graph."""
    num_encoder_tokens: int = 0
    """Sum of encoder_seq_lens without padded rows."""
    max_encoder_seq_len: int = 0

    req_ids: tuple[Any, ...] = ()
    """The requests, in the order of rows (persistent builder)."""
    moves: tuple[tuple[int, int], ...] = ()
    """Swaps of rows that the build made, in order, applied in turn (persistent builder)."""
    decodes_first: bool = False
    """The order of rows: decodes before prefills (persistent builder) or prompts before decodes (list builder)."""
    from_groups: bool = False
    """Whether the list builder's rules apply: capped windows, plain prompts without a table."""
    advanced: int = 0
    """The number of ``advance_step`` calls since the build."""
    builder: Any = None
    """The MetadataBuilder that built the step (persistent builder): a key for what a library keeps per builder."""
    page_buffer: Any = None
    """The buffer that the builder writes page indices to, int32[max_num_reqs * width] on the device: the same tensor
    in every step, to which a plan may point a kernel before the indices are written (persistent builder with a
    transport)."""
    step: int = 0
    """The step's number: its builder counts its builds from 0, and the list builder also what ``advance_step`` moves
    on. A captured size has the number of the step that it holds. 0 in views, and in metadata that no builder made."""
    group: str = ""
    """The KV-cache group whose slots and table these are (persistent builder)."""
    _placeholder_maps: Mapping[str, Any] = MappingProxyType({})
    source: Source | None = None
    """What a step of the list builder was built from; None for views, captured sizes and the persistent builder."""

    _of_rank = False
    """``of_rank`` of metadata that no builder of a rank made."""

    _view_as: type[Any] | None = None
    """The class of views; None: this one."""
    _copied_as: type[Any] | None = None
    """The class of a copy, where it is another one."""

    def __init__(self, host: Any, wrap: Wrap = read_only, **values: Any) -> None:
        self.__dict__.update(values, host=host, _wrap=wrap)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ARRAYS:  # the step is no longer as it was built: advance_step refuses it
            vars(self)["_replaced"] = name
        object.__setattr__(self, name, value)

    if not TYPE_CHECKING:  # a checker knows the fields from StepArrays, and refuses other names

        def __getattr__(self, name: str) -> Any:
            # Called only for missing attributes: wraps an array on first use and keeps it.
            value = self.__dict__[name] = self._of_host(name)
            return value

        def _of_host(self, name: str) -> Any:
            if name not in ARRAYS:
                own = getattr(type(self), name, None)
                if isinstance(own, property) and own.fget is not None:  # it wants a field, whose error says which
                    return own.fget(self)
                raise no_such_field(type(self).__name__, name)
            return self._derived(name) if name in DERIVED else self._wrapped(name)

    __repr__ = guarded(metadata_text)
    __str__ = guarded(step_grid)
    _repr_html_ = guarded_html(step_html)

    def __dir__(self) -> list[str]:
        """The attributes, and the fields that this step has."""
        return sorted({*super().__dir__(), *ARRAYS.intersection(dir(self.host))})

    def __copy__(self) -> Self:
        copied = object.__new__(self._copied_as or type(self))
        copied.__dict__.update(self.__dict__, _copied=True)
        if self.source is not None:  # advance_step writes to the arrays of the step, and the copy stays what it was
            self._settle_copy(copied)
        return copied

    def _settle_copy(self, copied: Self) -> None:
        """Gives a copy of a step of the list builder arrays of its own."""
        own, mine = vars(slices.own_arrays(self.host)), vars(copied)
        host = slices.HostArrays(**{name: np.copy(array) for name, array in own.items()})
        mine.update(source=None, host=host)
        for name in ("_prefill", "_decode", *OF_ARRAYS):
            mine.pop(name, None)
        for name in ARRAYS & mine.keys():
            value = mine[name]
            if hasattr(value, "clone"):
                mine[name] = value.clone()
            elif name in own and np.may_share_memory(value, own[name]):  # not what an engine has set in its place
                del mine[name]

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            "metadata: it cannot be pickled or copied deeply, for it belongs to its builder and its device; send "
            "metadata.asdict_zerocopy(), and make metadata of that with attncore.builder.metadata_from_fields"
        )

    @property
    def kept(self) -> dict[Any, Any]:
        """A dict for what a backend makes once per step and its layers share; the backend chooses the keys.

        It lives as long as the step: builders reuse metadata objects, and the next step has an empty one.
        """
        kept: dict[Any, Any] = self._cached("_kept", dict)
        return kept

    @property
    def block_table_bound(self) -> Any:
        """int32[n]: pages in use of each request, 0 until ``advance_step`` (list builder, with page lists)."""
        if not self.from_groups:
            raise AttributeError("block_table_bound: a field of the list builder")
        indptr = self.host.paged_kv_indptr
        return self._cached("_bound", lambda: self._wrap(np.diff(indptr) if self.advanced else 0 * indptr[1:]))

    @property
    def placeholder_maps(self) -> Mapping[str, Any]:
        """Modality -> PlaceholderMap: the tokens of this step that take embeddings of images, audio or video (list
        builder, of groups with ``placeholders``). Empty after ``advance_step``: a sampled token takes none. It is not
        among the fields that ``asdict_zerocopy`` gives.
        """
        return MappingProxyType({}) if self.advanced else self._placeholder_maps

    def advance_step(
        self,
        input_tokens: Any = None,
        sampled_token_ids: Any = None,
        num_queries: int | None = None,
        turn_prefills_into_decodes: bool = False,
    ) -> None:
        """Moves the step on by one token, in place (list builder): see ``attncore.builder.advance_step``."""
        if self.source is None:
            raise ValueError(
                "metadata: not as CommonMetadataBuilder.build gave it (a copy, a view, a captured size, or of the "
                "persistent builder); advance the built step"
            )
        self.source.builder.advance_step(self, input_tokens, sampled_token_ids, num_queries, turn_prefills_into_decodes)

    @property
    def prefill_metadata(self) -> CommonAttentionMetadata | None:
        """The prefills of this step as a batch of their own; None without prefills. Cached."""
        view: CommonAttentionMetadata | None = self._cached("_prefill", self._prefill_view)
        return view

    @property
    def host_lengths(self) -> str:
        """What ``host`` knows of the lengths of this step, or of the one that this is a view of: ``exact``;
        ``bounded``, upper bounds of those on the device; ``none``.
        """
        step = step_of(self)
        return "exact" if step.builder is None else str(step.builder.host_lengths(step))

    @property
    def of_rank(self) -> bool:
        """Whether slots and lengths are those that one rank of several keeps, as of a builder with
        ``context_parallel`` or of ``ContextParallel.metadata``: no rank takes its share of them again.
        """
        ranks = getattr(step_of(self).builder, "context_parallel", None)
        return bool(self._of_rank) or (ranks is not None and ranks.world_size > 1)

    @property
    def decode_metadata(self) -> CommonAttentionMetadata | None:
        """The decodes of this step as a batch of their own; None without decodes. Cached."""
        view: CommonAttentionMetadata | None = self._cached("_decode", self._decode_view)
        return view

    def asdict_zerocopy(self, skip_fields: Collection[str] | None = None) -> dict[str, Any]:
        """The fields by name, except ``skip_fields``, for broadcasting to other ranks; arrays are not copied.

        ``metadata_from_fields`` is the inverse. A name that this step has not may be skipped, too; ValueError for one
        that is no field of metadata and no attribute of the object or its class, TypeError for a str in place of names.
        """
        skip = names_to_skip(self, skip_fields)
        names = [name for name in (*BROADCAST, *sorted(ARRAYS - DERIVED)) if name not in skip]
        return {name: value for name in names if (value := getattr(self, name, None)) is not None}

    def _wrapped(self, name: str) -> Any:
        shares = self._wrap is read_only  # the host's view, which is read-only already
        array = getattr(self.host, name, None) if shares else slices.own_array(self.host, name)
        if array is None:
            if name == "span_ends" and hasattr(self.host, name):
                return None
            raise no_such_field(type(self).__name__, name)
        return array if shares else self._wrap(array)

    def _derived(self, name: str) -> Any:
        value = FIELDS[name].derive(self)  # type: ignore[misc]
        return read_only(value) if isinstance(value, np.ndarray) else value

    def _cached(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.__dict__:
            self.__dict__[key] = make()
        return self.__dict__[key]

    def _prefill_view(self) -> CommonAttentionMetadata | None:
        if not self.num_prefills:
            return None
        first = self.num_decodes if self.decodes_first else 0
        start = self.num_decode_tokens if self.decodes_first else 0
        return self._view(
            first, first + self.num_prefills, start, start + self.num_prefill_tokens,
            num_prefills=self.num_prefills, num_prefill_tokens=self.num_prefill_tokens,
            max_prefill_seq_len=self.max_prefill_seq_len, max_seq_len=self.max_prefill_seq_len,
            whole_encoder=self.from_groups,
        )  # fmt: skip

    def _decode_view(self) -> CommonAttentionMetadata | None:
        if not self.num_decode_tokens:
            return None
        if self.use_cuda_graph and not self.from_groups:
            return self  # all rows of a padded step are decodes, and a graph reads the addresses that later ones have
        first = 0 if self.decodes_first else self.num_prefills
        start = 0 if self.decodes_first else self.num_prefill_tokens
        return self._view(
            first, first + self.num_reqs - self.num_prefills, start, start + self.num_decode_tokens,
            num_decodes=self.num_decodes, num_decode_tokens=self.num_decode_tokens,
            max_decode_seq_len=self.max_decode_seq_len, max_seq_len=self.max_decode_seq_len,
            max_decode_query_len=self.max_decode_query_len, use_cuda_graph=self.use_cuda_graph,
            whole_encoder=self.from_groups,
        )  # fmt: skip

    def _view(
        self, first: int, last: int, start: int, stop: int, *, whole_encoder: bool = False, **counts: int
    ) -> CommonAttentionMetadata:
        """Rows first:last and tokens start:stop as a batch, with indices rebased to its start.

        ``whole_encoder``: the encoder fields cover all rows, as in views of the first generation.
        """
        host, encoder_counts = slices.slice_host(self.host, first, last, start, stop, whole_encoder)
        if whole_encoder or -1 in encoder_counts.values():  # of all requests, of which this may be a view of some
            encoder_counts = {name: getattr(self, name) for name in encoder_counts}
        none = dict.fromkeys(COUNTS, 0) | {"max_decode_query_len": 1, "use_cuda_graph": False}
        values_of_view = none | counts | encoder_counts | {
            "num_reqs": last - first,
            "num_tokens": stop - start,
            "max_query_len": self._longest_query(host),
            "req_ids": self.req_ids[first:last],
            "decodes_first": self.decodes_first,
            "from_groups": self.from_groups,
        }  # fmt: skip
        lengths = slices.own_array(host, "seq_lens") if encoder_counts else None
        if lengths is not None and slices.is_cross(host):
            values_of_view["max_seq_len"] = int(lengths.max(initial=0))  # the encoder's, not the decoder's
        if maps := self.placeholder_maps:
            parts = {name: one.of_tokens(start, stop, first) for name, one in maps.items()}
            values_of_view["_placeholder_maps"] = {name: one for name, one in parts.items() if len(one.token_indices)}
        held = vars(self)
        values_of_view |= {name: held[name] for name in OF_VIEWS if name in held}
        view = (self._view_as or CommonAttentionMetadata)(host, self._wrap, **values_of_view)
        self._give_states(view, first, last)
        return view

    def _longest_query(self, host: _HostArrays) -> int:
        """The most tokens that a request of a view has: that of the step where neither field says it, as in one that
        came from another rank with the fields alone that a backend declares.
        """
        for name, counts in (("query_lens", np.asarray), ("query_start_loc", np.diff)):
            if (array := slices.own_array(host, name)) is not None:
                return int(counts(array).max(initial=0))
        return self.max_query_len

    def _give_states(self, view: CommonAttentionMetadata, first: int, last: int) -> None:
        """Gives a view of rows first:last the states of these, where the step has groups of states."""
        if (states := vars(self).get("states")) is not None:
            of_rows = {name: of_group.of_rows(view, first, last) for name, of_group in states.items()}
            vars(view)["states"] = MappingProxyType(of_rows)


def step_of(metadata: Any) -> Any:
    """The step that a view was taken of; other metadata itself."""
    taken_of = getattr(metadata, "__dict__", {}).get("_taken_of")
    return metadata if taken_of is None else taken_of[0]


def is_on_device(step: Any) -> bool:
    """Whether the device has the fields of a step: not yet while it is planned, or filled by an engine."""
    return getattr(step, "_is_on_device", True)


def check_metadata(name: str, metadata: Any) -> None:
    """TypeError where ``metadata`` is none."""
    if not isinstance(metadata, CommonAttentionMetadata):
        raise TypeError(f"{name}: {type(metadata).__name__} found; give the metadata of a step")
