"""The fields of metadata, each declared once: name, dtype, length, padding, rebasing, and which builders make it.

Everything that handles fields by name reads this table: the layout of arenas, views and slices, padded rows of the list
builder's buffers, broadcasting, the replay's oracle, the table in docs/api.md. What cannot be derived, such as the
kernels that fill the arrays and the attributes of ``StepArrays``, is compared with it by
tests/builder/test_fields.py.

A new field is an entry here and an attribute with a docstring in ``attncore/step_arrays.py``. It is filled by its
``derive``, or by the kernels (kernels/cython and kernels/numba).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from attncore.did_you_mean import did_you_mean
from attncore.kernels.codes import PAD_SLOT_ID
from attncore.quoted import MAX_PART, one_line, quoted


class Length(enum.Enum):
    """How many elements a field has; the value is what docs/api.md prints."""

    TOKEN = "T"
    REQUEST = "n"
    START = "n + 1"
    """The start of each request, and the end of the last."""
    ENCODER_TOKEN = "E"
    PAGE = "P"
    """One per page: ``paged_kv_indptr[-1]``."""
    TABLE = "n, width"


class Owner(enum.Enum):
    """What a field belongs to in a step of several KV-cache groups."""

    STEP = "step"
    GROUP = "group"
    BLOCK_SIZE = "block size"
    """Shared by groups of the same block size."""
    ENCODER = "encoder"
    """The step, where the batch has a cross group."""
    CROSS = "cross"
    """The cross group."""
    TREES = "draft trees"
    """The step, where the builder was made with ``draft_trees``."""
    SPANS = "spans"
    """The step, where the batch was made with ``spans``; None in one in which no request is in a span."""


class Pad(enum.Enum):
    """The value of padded rows, where it is not a constant."""

    SEQ_LEN = "pad_seq_len"
    """The backend's ``pad_seq_len`` (list builder: 1)."""
    REPEAT = "the last value again"
    GROW = "the last value and pad_seq_len more a row"
    LAST_ROW = "the last row (list builder: its own row)"
    NONE = "no padded rows"


class Rebase(enum.Enum):
    """What is subtracted from a slice of a batch, so that it counts from its own start."""

    NOTHING = "nothing"
    FIRST_ROW = "the first row's index"
    FIRST_TOKEN = "the first token's index"
    FIRST_VALUE = "its own first value"


class Builders(NamedTuple):
    """What docs/api.md says of a field for each builder; empty: the builder does not make the field."""

    persistent: str
    lists: str


class Field(NamedTuple):
    """One array of metadata. ``derive``, where given, computes it on access from other fields, on host or device."""

    name: str
    dtype: type[np.generic]
    length: Length
    owner: Owner = Owner.STEP
    pad: int | Pad = Pad.NONE
    rebase: Rebase = Rebase.NOTHING
    builders: Builders = Builders("yes", "yes")
    list_pads: bool = True
    """Whether the list builder's arrays have padded rows too."""
    derive: Callable[[Any], Any] | None = None
    internal: bool = False
    """Whether only views of the persistent builder's steps read it."""

    def num_elements(self, num_tokens: int, num_reqs: int, num_encoder_tokens: int) -> int:
        """Elements of the array in a step of that many tokens, requests and running encoder tokens.

        Raises ValueError for tables and page indices, whose length does not follow from these.
        """
        match self.length:
            case Length.TOKEN:
                return num_tokens
            case Length.REQUEST:
                return num_reqs
            case Length.START:
                return num_reqs + 1
            case Length.ENCODER_TOKEN:
                return num_encoder_tokens
        raise ValueError(f"{self.name}: its length does not follow from tokens and requests")


_CROSS = Builders("cross group", "encoder/decoder")
_PAGED = Builders("yes", "`flashinfer`")
_OF_VIEWS = Builders("views", "")
MOST_TREE_TOKENS = 64
"""Tokens of a draft tree, the root included: the bits of ``tree_mask``."""
_OF_TREES = Builders("`draft_trees`", "")
_OF_SPANS = Builders("`spans`; None: no token is in one", "")

_FIELDS = (
    Field("slot_mapping", np.int64, Length.TOKEN, Owner.GROUP, PAD_SLOT_ID, builders=Builders("yes", "yes, padded")),
    Field("positions", np.int64, Length.TOKEN, pad=0, builders=Builders("yes", "yes, padded")),
    Field(
        "token_to_req_indices", np.int32, Length.TOKEN, pad=Pad.LAST_ROW, rebase=Rebase.FIRST_ROW,
        builders=Builders("yes", "yes, padded"),
    ),
    Field("tree_mask", np.int64, Length.TOKEN, Owner.TREES, 0, builders=_OF_TREES),
    Field("span_ends", np.int32, Length.TOKEN, Owner.SPANS, 0, builders=_OF_SPANS),
    Field(
        "seq_lens", np.int32, Length.REQUEST, pad=Pad.SEQ_LEN,
        builders=Builders("yes", "yes, padded with 1; capped for windowed decodes"),
    ),
    Field(
        "context_lens", np.int32, Length.REQUEST, pad=0, builders=Builders("yes", "yes, unpadded"), list_pads=False
    ),
    Field("query_lens", np.int32, Length.REQUEST, pad=0, builders=Builders("yes", "yes, unpadded"), list_pads=False),
    Field(
        "logits_indices", np.int32, Length.REQUEST, pad=0, rebase=Rebase.FIRST_TOKEN,
        builders=Builders("yes", "yes, unpadded"), list_pads=False,
    ),
    Field(
        "query_start_loc", np.int32, Length.START, pad=Pad.REPEAT, rebase=Rebase.FIRST_VALUE,
        builders=Builders("yes", "yes, unpadded"), list_pads=False,
    ),
    Field(
        "seq_start_loc", np.int32, Length.START, pad=Pad.GROW, rebase=Rebase.FIRST_VALUE,
        builders=Builders("yes", "yes, padded"),
    ),
    Field(
        "prefill_query_start_loc", np.int32, Length.START, rebase=Rebase.FIRST_VALUE, builders=_OF_VIEWS, internal=True
    ),
    Field(
        "prefill_seq_start_loc", np.int32, Length.START, rebase=Rebase.FIRST_VALUE, builders=_OF_VIEWS, internal=True
    ),
    Field(
        "block_table", np.int32, Length.TABLE, Owner.GROUP, 0,
        builders=Builders("live, fixed stride", "fresh; empty for plain prompts"),
    ),
    Field(
        "paged_kv_indptr", np.int32, Length.START, Owner.BLOCK_SIZE, Pad.REPEAT, Rebase.FIRST_VALUE, _PAGED
    ),
    Field("paged_kv_last_page_len", np.int32, Length.REQUEST, Owner.BLOCK_SIZE, 0, builders=_PAGED),
    Field(
        "paged_kv_indices", np.int32, Length.PAGE, Owner.GROUP, builders=Builders("gathered on demand", "`flashinfer`")
    ),
    Field(
        "paged_kv_num_pages", np.int32, Length.REQUEST, Owner.BLOCK_SIZE, builders=_PAGED,
        derive=lambda step: step.paged_kv_indptr[1:] - step.paged_kv_indptr[:-1],
    ),
    Field("encoder_seq_lens", np.int32, Length.REQUEST, Owner.ENCODER, Pad.SEQ_LEN, builders=_CROSS),
    Field("encoder_query_lens", np.int32, Length.REQUEST, Owner.ENCODER, 0, builders=_CROSS),
    Field("encoder_seq_start_loc", np.int32, Length.START, Owner.ENCODER, Pad.GROW, Rebase.FIRST_VALUE, _CROSS),
    Field("encoder_query_start_loc", np.int32, Length.START, Owner.ENCODER, Pad.REPEAT, Rebase.FIRST_VALUE, _CROSS),
    Field("cross_slot_mapping", np.int64, Length.ENCODER_TOKEN, Owner.CROSS, builders=_CROSS),
    Field(
        "cross_block_table", np.int32, Length.TABLE, Owner.CROSS, 0,
        builders=Builders("live, fixed stride", "fresh; prompts' rows are zeros"),
    ),
)  # fmt: skip

FIELDS = {field.name: field for field in _FIELDS}
"""Every array of metadata, by name."""

ARRAYS = frozenset(name for name, field in FIELDS.items() if not field.internal)
"""The arrays that metadata may have."""

ENCODER_ARRAYS = frozenset(name for name, field in FIELDS.items() if field.owner in (Owner.ENCODER, Owner.CROSS))
"""The arrays that a step without encoder input does not have."""

OPTIONAL = frozenset(name for name, field in FIELDS.items() if field.owner in (Owner.TREES, Owner.SPANS))
"""The arrays that a step may lack though a backend declares that it reads them: without them nothing is special."""

DERIVED = frozenset(name for name, field in FIELDS.items() if field.derive is not None)


def named(*lengths: Length, owners: frozenset[Owner] | None = None) -> tuple[str, ...]:
    """Names of the arrays of these lengths (and owners), in table order, without internal and derived ones."""
    return tuple(
        name
        for name, field in FIELDS.items()
        if field.length in lengths
        and not field.internal
        and field.derive is None
        and (owners is None or field.owner in owners)
    )


COUNTS = (
    "num_reqs", "num_tokens", "num_decodes", "num_decode_tokens", "num_prefills", "num_prefill_tokens",
    "max_query_len", "max_seq_len", "max_prefill_seq_len", "max_decode_seq_len", "max_decode_query_len",
    "use_cuda_graph", "num_encoder_tokens", "max_encoder_seq_len",
)  # fmt: skip
"""The counts of every step, of both builders: ints, and the bool ``use_cuda_graph``."""

ACTUAL_COUNTS = ("num_actual_reqs", "num_actual_tokens")
"""The counts of a padded step without its padding (persistent builder)."""

FLAGS = ("decodes_first", "from_groups", "of_rank")
"""The order of rows, which builder's rules apply, and whether the step is one rank's of several."""

BROADCAST = (*COUNTS, *FLAGS, *ACTUAL_COUNTS)
"""What is sent to other ranks beside the arrays."""


def no_such_field(of: str, name: str, more: Iterable[str] = ()) -> AttributeError:
    """The error for a name that is no field of ``of``, or none of this step; ``more`` are fields of an engine."""
    if name in FIELDS:  # asked in every view of a step, of which most have no encoder: nothing is compared for it
        return AttributeError(f"{of} has no field {name!r} in this step (docs/api.md says which steps have it)")
    return AttributeError(f"{of} has no field {name!r}{did_you_mean(name, (*ARRAYS, *BROADCAST, *more))}")


def names_to_skip(metadata: object, names: Iterable[str] | None) -> frozenset[str]:
    """``skip_fields`` of ``asdict_zerocopy``, checked; fields of a subclass count as fields."""
    if isinstance(names, str):
        raise TypeError(f"skip_fields: {quoted(names)} is a str; give a collection of names")
    try:
        skip = frozenset(() if names is None else names)
    except TypeError as error:
        raise TypeError(
            f"skip_fields: {quoted(names)} is no collection of names: {one_line(error, MAX_PART)}"
        ) from None
    others = skip - FIELDS.keys() - set(BROADCAST)
    if others:
        annotated = (vars(kind).get("__annotations__", ()) for kind in type(metadata).__mro__)
        own = {*dir(type(metadata)), *vars(metadata)}.union(*annotated)
        for name in sorted(others - own, key=quoted):
            close = did_you_mean(name, (*ARRAYS, *BROADCAST, *(one for one in own if not one.startswith("_"))))
            raise ValueError(f"skip_fields: {quoted(name)} is no field of metadata{close}")
    return skip


def engine_field(name: str, dtype: type[np.generic], length: Length) -> Field:
    """A field of an engine (``MetadataBuilder.register_field``): one element per token or request, padded with 0."""
    return Field(name, dtype, length, pad=0)
