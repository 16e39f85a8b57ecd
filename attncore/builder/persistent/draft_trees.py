"""Draft trees of a builder: the trees of the step that is built, those that ran, and the paths that are kept of them.

A step's tokens lie at consecutive slots, in the order in which they are given, whatever the tree: siblings have slots
of their own. What is kept of a tree is moved together afterwards, so that a cache holds contexts without gaps.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import arguments
from attncore.builder.blocks.draft_trees import checked_parents, checked_path, masks_and_depths
from attncore.builder.fields import FIELDS
from attncore.builder.slices import own_array
from attncore.kernels import codes
from attncore.quoted import quoted
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.persistent.batch_core import BatchCore
    from attncore.builder.persistent.block_table import BlockTable
    from attncore.builder.persistent.group_backends import Backends
    from attncore.builder.persistent.settings import Settings
    from attncore.builder.persistent.step_metadata import StepMetadata

_INT64 = npt.NDArray[np.int64]


class _Ran(NamedTuple):
    """A tree that a step ran: its parents, the tokens that were computed before it, and when that was."""

    parents: npt.NDArray[np.int32]
    context: int
    changes: int

    @property
    def end(self) -> int:
        """The tokens that count as computed behind the step."""
        return self.context + 1 + len(self.parents)


class DraftTrees:
    """Fills ``tree_mask``, and positions by depth; remembers trees until a path of each is kept."""

    field = FIELDS["tree_mask"]

    def __init__(self, core: BatchCore) -> None:
        self._core = core
        self._given: dict[Hashable, npt.NDArray[np.int32]] = {}
        """Parents of the step that is being built, by request."""
        if core.ran_trees is None:
            core.ran_trees = {}

    @property
    def _ran(self) -> dict[int, _Ran]:
        """Trees of earlier steps of any builder of the batch, by their request's place, until it runs again."""
        ran: dict[int, _Ran] = self._core.ran_trees or {}
        return ran

    @property
    def given(self) -> Collection[Hashable]:
        """The requests that run a tree in the step that is being built."""
        return self._given.keys()

    def begin(self, trees: Any, scheduled: Any, most: int) -> Any:
        """Takes the trees of the next step; returns ``scheduled`` with their tokens.

        ValueError or TypeError where they are no trees of at most ``most`` tokens, or ``scheduled`` says otherwise.
        """
        self._core.undo.append((setattr, self, "_given", {}))
        self._given = {}
        if trees is None:
            return scheduled
        for name, given in (("trees", trees), ("scheduled", scheduled)):
            if not isinstance(given, Mapping):
                what = "parents" if name == "trees" else "tokens"
                raise TypeError(f"{name}: {quoted(given)} is not a mapping of request to {what}")
        checked, tokens = {}, dict(scheduled.items())
        for req_id, parents in trees.items():
            if req_id not in self._core.order.row_of:
                raise ValueError(f"trees: {quoted(req_id)} is not in the batch")
            checked[req_id] = checked_parents(req_id, parents)
            count = len(checked[req_id]) + 1
            if req_id in tokens and (asked := arguments.integer("scheduled", tokens[req_id], 0)) != count:
                raise ValueError(
                    f"scheduled: {asked} for {quoted(req_id)}, whose tree has {counted(count - 1, 'draft')} and its "
                    f"root; give {count}, or leave it to the tree"
                )
            if count > most:
                raise ValueError(
                    f"trees: {counted(count, 'token')} of request {quoted(req_id)} exceed decode_threshold {most}; "
                    f"make the builder with decode_threshold={count}"
                )
            tokens[req_id] = count
        self._given = checked
        return tokens

    def fill(self, metadata: StepMetadata, out: _INT64) -> None:
        """Writes ``tree_mask`` int64[T], and the positions of trees by depth."""
        given, core = self._given, self._core
        if not given:
            return
        core.undo += [(setattr, self, "_given", {}), (setattr, core, "ran_trees", core.ran_trees)]
        host, left = metadata.host, dict(self._ran)
        rows: list[int] = []
        contexts, changes = host.context_lens, metadata._arena.changes
        for row, (req_id, context) in enumerate(zip(metadata.req_ids, contexts.tolist(), strict=False)):
            if req_id in given:
                rows.append(row)
                left[_place(core, row)] = _Ran(given[req_id], context, changes)
        if rows:
            masks, depths = masks_and_depths([given[metadata.req_ids[row]] for row in rows])
            lengths = host.query_lens[rows].astype(np.int64)
            first = host.query_start_loc[rows].astype(np.int64) - (np.cumsum(lengths) - lengths)
            tokens = np.repeat(first, lengths) + np.arange(len(masks))
            out[tokens] = masks
            own_array(host, "positions")[tokens] = np.repeat(contexts[rows], lengths) + depths
        self._given, core.ran_trees = {}, left

    def keep(self, paths: Any) -> dict[str, _INT64]:
        """Keeps one path of each request's tree: takes back its other tokens, and returns by KV-cache group what is to
        be moved, int64[n, 2]: pairs of slots, from and to. See ``MetadataBuilder.keep_paths``.
        """
        core = self._core
        if not isinstance(paths, Mapping):
            raise TypeError(f"paths: {quoted(paths)} is not a mapping of request to accepted drafts")
        left = dict(self._ran)
        computed = core.lengths[codes.COMPUTED]
        rows, lengths = [], []
        moving_rows, sources, targets = [], [], []  # of all requests, tokens by index in theirs
        for req_id, path in paths.items():
            row = core.order.row(req_id)
            ran = left.pop(_place(core, row), None)
            if ran is None or _came_later(core, row, ran) or computed[row] != ran.end:
                raise ValueError(
                    f"paths: request {quoted(req_id)} has not run a tree in its last step, or tokens of it were taken "
                    "back since; keep a path between that step and any other change, and take back other tokens with "
                    "batch.rollback_many"
                )
            drafts = checked_path(req_id, path, ran.parents)
            for kept, draft in enumerate(drafts):
                if draft != kept:
                    moving_rows.append(row)
                    sources.append(ran.context + 1 + draft)
                    targets.append(ran.context + 1 + kept)
            rows.append(row)
            lengths.append(ran.context + 1 + len(drafts))
            for table in core.decoders:
                if table.group.sliding_window is not None:
                    table.check_sees(row, req_id, lengths[-1], "paths")
        pairs = np.array([sources, targets], np.int64).T
        moves = {table.group.name: _slots(core, table, moving_rows, pairs) for table in core.decoders}
        core.undo.append((setattr, core, "ran_trees", core.ran_trees))
        core.undo.append((np.copyto, computed, computed.copy()))
        core.ran_trees = left
        computed[rows] = lengths
        return moves


def settle_trees(core: BatchCore, metadata: StepMetadata) -> None:
    """Forgets the trees of requests that run in a step of any builder over the batch.

    ValueError where what counts as computed of one is no chain.
    """
    ran = core.ran_trees
    if not ran:
        return
    left, computed = dict(ran), metadata.host.positions
    for row, req_id in enumerate(metadata.req_ids):
        if (earlier := left.pop(_place(core, row), None)) is not None:
            _check_kept(core, req_id, row, earlier, int(computed[metadata.host.query_start_loc[row]]))
    if len(left) < len(ran):
        core.undo.append((setattr, core, "ran_trees", ran))
        core.ran_trees = left


def unsettled(core: BatchCore, before: dict[int, Any], num_reqs: int) -> dict[int, Any]:
    """The trees that ran, once a step of the first ``num_reqs`` rows is taken back: those rows have the ones of
    ``before`` it.
    """
    places = set(core.lengths[codes.PLACE, :num_reqs].tolist())
    others = {place: ran for place, ran in (core.ran_trees or {}).items() if place not in places}
    return others | {place: ran for place, ran in before.items() if place in places}


def _place(core: BatchCore, row: int) -> int:
    return int(core.lengths[codes.PLACE, row])


def _came_later(core: BatchCore, row: int, ran: _Ran) -> bool:
    """Whether the request in ``row`` is another one, which has the place by now."""
    return bool(core.added_at[_place(core, row)] > ran.changes)


def _check_kept(core: BatchCore, req_id: Hashable, row: int, ran: _Ran, computed: int) -> None:
    """ValueError where tokens of a tree count as computed that are no chain: later ones would see siblings."""
    drafts = min(computed - ran.context - 1, len(ran.parents))
    if drafts <= 0 or _came_later(core, row, ran) or (ran.parents[:drafts] == np.arange(-1, drafts - 1)).all():
        return
    raise ValueError(
        f"trees: request {quoted(req_id)} ran a tree of {counted(len(ran.parents), 'draft')}, of which its first "
        f"{drafts} count as computed and are no path; say what was accepted with builder.keep_paths first"
    )


def _slots(core: BatchCore, table: BlockTable, rows: list[int], tokens: _INT64) -> _INT64:
    """The slots of ``tokens`` int64[n, 2], by index in the request of ``rows``; ValueError where one lies in a block
    that was released.
    """
    size = table.group.tokens_per_column
    blocks: _INT64 = table.array.take(np.array(rows, np.int64)[:, None] * table.array.shape[1] + tokens // size).astype(
        np.int64
    )
    released = np.flatnonzero((blocks < table.group.kernel_blocks).any(axis=1))
    if len(released):
        raise ValueError(
            f"paths: a draft of request {quoted(core.order.req_ids[rows[released[0]]])} lies in a block of group "
            f"{table.group.name!r} that its window has passed; keep paths before release_passed_blocks, or release "
            "with num_rollback"
        )
    slots: _INT64 = blocks * size + tokens % size
    return slots


def check_draft_trees(backends: Backends, settings: Settings, takes_verdicts: bool) -> None:
    """ValueError where a builder cannot run draft trees; the text says why, and what to do."""
    if settings.decode_threshold == 1:
        raise ValueError("draft_trees: decode_threshold 1 leaves room for no draft; give 1 + the drafts of a tree")
    if settings.context_parallel is not None:
        raise ValueError("draft_trees: not with context_parallel; a rank has some of a tree's keys, which no mask says")
    if takes_verdicts:
        raise ValueError(
            "draft_trees: not with num_rejected; what is kept of a tree is moved before the next step, which cannot be "
            "built without the verdicts"
        )
    for name, backend in backends.by_group.items():
        if backend is not None and backend.spec is not None and "tree_mask" not in backend.spec.features:
            why = backend.spec.unsupported.get("tree_mask", "its spec does not declare it")
            raise ValueError(
                f"draft_trees: backend {backend.name!r} of group {name!r} does not have the feature tree_mask ({why}); "
                "ask for it in the request, features={'tree_mask'}, or draft chains"
            )
