"""Steps with draft trees: masks, positions by depth, slots by index; and what is kept of them."""

from types import SimpleNamespace

import numpy as np
import pytest
from interrupted_calls import AtOpcode

from attncore.builder import (
    ContextParallel,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    StateGroup,
    local_attention_metadata,
    metadata_from_fields,
    slice_by_requests,
    slice_by_tokens,
    slice_metadata,
)
from attncore.builder.device.by_copy import CopyTransport
from attncore.builder.fields import ARRAYS

BLOCK = 4
TREE = [-1, -1, 0, 1, 1, 3]
"""Two children of the root; the first has one, the second two, of which the first has one."""
MASKS = [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b100101, 0b1010101]
DEPTHS = [0, 1, 1, 2, 2, 2, 3]


class Abandonable(CopyTransport):
    """A step in ``pending`` waits for its replay, as with nodes of graphs."""

    def send(self, step, shape, out, num_rows, waits):
        super().send(step, shape, out, num_rows, waits)
        self.pending = step if waits else -1


def new_builder(kernels=None, threshold=8, *, trees=True, **options):
    batch = InputBatch(max_num_reqs=6, max_model_len=64, block_size=BLOCK, kernels=kernels)
    options = {"max_num_batched_tokens": 64, "decode_threshold": threshold, "draft_trees": trees} | options
    return batch, MetadataBuilder(batch, **options)


def started(kernels=None, **options):
    batch, builder = new_builder(kernels, **options)
    batch.add_request("a", [9, 3, 7, 5], 5)
    batch.add_request("b", [1, 2, 6], 2)
    return batch, builder


def test_a_tree_has_its_mask_positions_by_depth_and_slots_by_index(kernels):
    batch, builder = started(kernels)
    batch.add_request("prompt", [10, 11, 12])
    metadata = builder.build({"prompt": 10}, trees={"a": TREE})
    assert metadata.req_ids == ("a", "b", "prompt")
    assert metadata.query_lens.tolist() == [7, 1, 10]
    assert metadata.tree_mask.dtype == np.int64
    assert metadata.tree_mask.tolist() == [*MASKS, *[0] * 11]
    assert metadata.positions.tolist() == [*(5 + depth for depth in DEPTHS), 2, *range(10)]
    assert metadata.slot_mapping.tolist()[:8] == [13, 14, 15, 28, 29, 30, 31, 6]
    assert metadata.seq_lens.tolist() == [12, 3, 10]
    assert batch.num_computed_tokens("a") == 12
    decodes, prefills = metadata.decode_metadata, metadata.prefill_metadata
    assert (decodes.tree_mask.tolist(), prefills.tree_mask.tolist()) == ([*MASKS, 0], [0] * 10)
    assert decodes.positions.tolist() == metadata.positions.tolist()[:8]


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_of_trees_chains_and_prompts(kernels, seed):
    """Each request's fields are those that it has alone, and what is no tree is as without trees."""
    random = np.random.default_rng(seed)
    batch, builder = new_builder(kernels, 64, max_num_batched_tokens=400)
    plain_batch, plain = new_builder(kernels, 64, trees=False, max_num_batched_tokens=400)
    for row in range(6):
        context = int(random.integers(0, 5))
        for one in (batch, plain_batch):
            one.add_request(row, list(range(1 + 16 * row, 17 + 16 * row)), context)
    trees = {}
    for row in range(0, 6, 2):
        trees[row] = [int(random.integers(-1, draft)) if draft else -1 for draft in range(random.integers(0, 40))]
    others = {1: 20, 3: 1, 5: 9}
    metadata = builder.build(others, trees=trees)
    same = plain.build(others | {row: len(tree) + 1 for row, tree in trees.items()})
    assert metadata.req_ids == same.req_ids
    for row, req_id in enumerate(metadata.req_ids):
        tokens = slice(*metadata.query_start_loc[row : row + 2])
        context = int(metadata.context_lens[row])
        depths, masks = [0], [1]
        for draft, parent in enumerate(trees.get(req_id, [])):
            depths.append(depths[parent + 1] + 1)
            masks.append(masks[parent + 1] | 1 << (draft + 1))
        if req_id in trees:
            assert metadata.positions[tokens].tolist() == [context + depth for depth in depths]
            assert metadata.tree_mask[tokens].tolist() == masks
        else:
            assert metadata.positions[tokens].tolist() == same.positions[tokens].tolist()
            assert not metadata.tree_mask[tokens].any()
    for name in ARRAYS - {"tree_mask", "positions"}:
        if hasattr(same, name):
            assert getattr(metadata, name).tolist() == getattr(same, name).tolist(), name


def test_a_chain_is_as_todays_drafts(kernels):
    """A tree that is a chain has the fields of a step without trees, but for the mask, which says the same."""
    steps = []
    for trees, scheduled in (({"a": [-1, 0, 1]}, {}), (None, {"a": 4})):
        batch, builder = started(kernels)
        metadata = builder.build(scheduled, trees=trees)
        steps.append({name: getattr(metadata, name).tolist() for name in ARRAYS if hasattr(metadata, name)})
        if trees:
            assert builder.keep_paths({"a": [0, 1]}).tolist() == []
        else:
            batch.rollback("a", 1)
        assert builder.build().slot_mapping.tolist() == [28, 7]
    assert (steps[0].pop("tree_mask"), steps[1].pop("tree_mask")) == ([1, 3, 7, 15, 0], [0] * 5)
    assert steps[0] == steps[1]


def test_a_kept_path_lies_where_a_chain_does(kernels):
    batch, builder = started(kernels)
    slots = builder.build(trees={"a": TREE, "b": [-1, -1]}).slot_mapping.tolist()
    moves = builder.keep_paths({"a": [1, 3, 5], "b": []})
    assert moves.dtype == np.int64
    assert moves.tolist() == [[slots[2], slots[1]], [slots[4], slots[2]], [slots[6], slots[3]]]
    assert [batch.num_computed_tokens(name) for name in "ab"] == [9, 3]
    metadata = builder.build()
    assert (metadata.positions.tolist(), metadata.slot_mapping.tolist()) == ([9, 3], [slots[4], slots[8]])
    assert not metadata.tree_mask.any()


def test_moves_are_those_of_each_group():
    """A window's group has other blocks, and kernel blocks of another size; an encoder's has no moves."""
    groups = [
        KVCacheGroup("full", 8, kernel_block_size=4), KVCacheGroup("window", 2, sliding_window=4),
        KVCacheGroup("cross", 4, cross=True),
    ]  # fmt: skip
    batch = InputBatch(max_num_reqs=2, max_model_len=64, groups=groups, max_encoder_len=8)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, decode_threshold=8, draft_trees=True)
    ids = {"full": [5, 6], "window": [0, 3, 4, 7, 8, 9], "cross": [1]}
    batch.add_request("a", ids, 5, encoder_seq_len=3)
    metadata = builder.build(trees={"a": [-1, -1, 1]})
    slots = {name: metadata.groups[name].slot_mapping.tolist() for name in ("full", "window")}
    assert slots == {"full": [45, 46, 47, 48], "window": [9, 14, 15, 16]}
    assert all(metadata.groups[name].tree_mask.tolist() == [1, 3, 5, 13] for name in metadata.groups)
    moves = builder.keep_paths({"a": [1, 2]})
    assert {name: pairs.tolist() for name, pairs in moves.items()} == {
        name: [[of[2], of[1]], [of[3], of[2]]] for name, of in slots.items()
    }


def test_padded_steps_of_a_captured_size_hold_trees(kernels):
    _, builder = started(kernels)
    captured = builder.capture(3, query_len=4)
    assert captured.tree_mask.tolist() == [0] * 12
    metadata = builder.build(trees={"a": [-1, -1, 0], "b": [-1, 0, 0]}, bucket=3)
    assert metadata.tree_mask.tolist() == [1, 3, 5, 11, 1, 3, 7, 11, *[0] * 4]
    assert captured.tree_mask.tolist() == metadata.tree_mask.tolist()
    assert metadata.positions.tolist() == [5, 6, 6, 7, 2, 3, 4, 4, *[0] * 4]
    builder.keep_paths({"a": [0, 2], "b": [0, 2]})
    metadata = builder.build(query_len=4, bucket=3)  # chains: the masks of the last step are gone
    assert (metadata.tree_mask.tolist(), metadata.positions.tolist()) == (
        [0] * 12, [8, 9, 10, 11, 5, 6, 7, 8, *[0] * 4]
    )  # fmt: skip
    assert builder.build_empty(3).tree_mask.tolist() == [0] * 12


def test_trees_are_sent_to_ranks_and_sliced():
    _, builder = started()
    metadata = builder.build(trees={"a": [-1, -1], "b": [-1, 0]})
    arrived = metadata_from_fields(metadata.asdict_zerocopy())
    assert arrived.tree_mask.tolist() == metadata.tree_mask.tolist() == [1, 3, 5, 1, 3, 7]
    second = slice_by_requests(metadata.query_lens, 2)[1]
    assert slice_metadata(metadata, second).tree_mask.tolist() == [1, 3, 7]
    with pytest.raises(ValueError, match=r"^batch_slice: cuts a request of a step with draft trees; slice by requests"):
        slice_metadata(metadata, slice_by_tokens(metadata.query_lens, 3)[0])
    with pytest.raises(
        ValueError, match=r"^metadata: it holds draft trees, whose tokens see some of those before them"
    ):
        local_attention_metadata(metadata, 4, BLOCK)


@pytest.mark.parametrize(
    ("token", "mask"),
    [(0, 0), (1, 2), (1, 1), (2, 0b1101), (2, 0), (3, 3), (3, -1), (6, 1 << 62), (6, 0b1000001 - (1 << 63))],
)
def test_masks_that_arrive_and_are_no_trees_are_refused(token, mask):
    _, builder = started()
    metadata = builder.build({"b": 1}, trees={"a": TREE})
    rows = dict(zip(metadata.req_ids, metadata.query_start_loc.tolist(), strict=False))
    of_request = rows["a"] + token if token != 3 else rows["b"]
    fields = metadata.asdict_zerocopy()
    masks = fields["tree_mask"] = fields["tree_mask"].copy()
    assert metadata_from_fields(fields).tree_mask.tolist() == masks.tolist()
    masks[of_request] = mask
    with pytest.raises(ValueError, match=r"^fields\['tree_mask'\]: -?\d+ of token \d+, which is \d of its request"):
        metadata_from_fields(fields)


def test_what_a_build_may_not_find_of_the_last_tree(kernels):
    """Siblings that count as computed; a chain, or nothing, may stay."""
    batch, builder = started(kernels)
    builder.build({"b": 0}, trees={"a": TREE})
    said = "^trees: request 'a' ran a tree of 6 drafts, of which its first {} count as computed and are no path; say"
    with pytest.raises(ValueError, match=said.format(6)):
        builder.build()
    assert [batch.num_computed_tokens(name) for name in "ab"] == [12, 2]
    assert builder.build({"a": 0}).req_ids == ("b",)  # which a rests for, and is still to be said
    batch.rollback("a", 4)
    with pytest.raises(ValueError, match=said.format(2)):
        builder.build()
    batch.rollback("a", 1)  # the root and the first draft are a path
    assert builder.build().positions.tolist() == [3, 7]  # b, which ran when a rested, comes first
    assert builder.build().positions.tolist() == [4, 8]


@pytest.mark.parametrize("leaves", ["remove", "preempt"])
def test_a_request_that_leaves_takes_its_tree_along(leaves):
    batch, builder = started()
    builder.build({"b": 0}, trees={"a": TREE})
    if leaves == "remove":
        batch.remove_request("a")
        batch.add_request("a", [9, 3, 7, 5], 12)
    else:
        batch.preempt("a")
        batch.append_blocks("a", [9, 3, 7, 5])
    with pytest.raises(ValueError, match=r"^paths: request 'a' has not run a tree in its last step"):
        builder.keep_paths({"a": [0]})
    assert builder.build({"b": 0}).positions.tolist() == [12 if leaves == "remove" else 0]


def test_trees_of_requests_that_left_are_not_kept(kernels):
    """However many requests leave behind a tree: a batch keeps one for each of its places at most."""
    batch, builder = new_builder(kernels)
    for name in range(100):
        batch.add_request(name, [9, 3, 7, 5], 5)
        builder.build(trees={name: TREE})
        batch.remove_request(name)
    assert len(batch._core.ran_trees) <= batch.max_num_reqs


@pytest.mark.parametrize("next_tree", [None, [-1, -1]])
def test_a_step_that_is_taken_back_leaves_the_tree_before_it(monkeypatch, kernels, next_tree):
    """A chain may run on without ``keep_paths``, and be kept where that step was none."""
    monkeypatch.setattr("attncore.builder.device.by_copy.CopyTransport", Abandonable)
    batch, builder = started(kernels, transport="copy")
    builder.capture(2, 3)
    builder.build(trees={"a": [-1, 0]})
    metadata = builder.build({"b": 0}, trees=None if next_tree is None else {"a": next_tree}, bucket=2)
    metadata.abandon()
    builder.keep_paths({"a": [0]})
    assert batch.num_computed_tokens("a") == 7


@pytest.mark.parametrize("ran", [0, 1])
def test_steps_ahead_that_are_given_back_leave_the_tree_before_them(kernels, ran):
    batch, builder = started(kernels, transport="copy")
    builder.capture(2)
    builder.build(trees={"a": [-1, 0]})
    steps = builder.run_ahead(2, bucket=2)
    for _ in range(ran):
        steps.replay(SimpleNamespace(replay=lambda: None))
    assert steps.stop() == ran
    if ran:
        with pytest.raises(ValueError, match=r"^paths: request 'a' has not run a tree in its last step"):
            builder.keep_paths({"a": [0]})
    else:
        builder.keep_paths({"a": [0]})
    assert batch.num_computed_tokens("a") == (9 if ran else 7)


def test_a_path_is_kept_once_and_at_once(kernels):
    batch, builder = started(kernels)
    refused = "^paths: request '{}' has not run a tree in its last step, or tokens of it were taken back since"
    with pytest.raises(ValueError, match=refused.format("a")):
        builder.keep_paths({"a": []})
    builder.build(trees={"a": TREE})
    with pytest.raises(ValueError, match=refused.format("b")):
        builder.keep_paths({"a": [0], "b": []})
    assert batch.num_computed_tokens("a") == 12  # nothing has changed
    batch.rollback("a", 1)
    with pytest.raises(ValueError, match=refused.format("a")):
        builder.keep_paths({"a": [0]})
    batch.rollback("a", 6)
    builder.build({"b": 0}, trees={"a": TREE})
    builder.keep_paths({"a": [0, 2]})
    with pytest.raises(ValueError, match=refused.format("a")):
        builder.keep_paths({"a": [0, 2]})
    assert batch.num_computed_tokens("a") == 8
    with pytest.raises(TypeError, match=r"^paths: .* is not a mapping of request to accepted drafts"):
        builder.keep_paths([0])
    with pytest.raises(ValueError, match=r"^req_id: 'nobody' is not in the batch"):
        builder.keep_paths({"nobody": []})


@pytest.mark.parametrize(
    ("scheduled", "trees", "error", "said"),
    [
        ({"a": 3}, {"a": TREE}, ValueError, "scheduled: 3 for 'a', whose tree has 6 drafts and its root; give 7"),
        ({}, {"a": [-1] * 8}, ValueError, "trees: 9 tokens of request 'a' exceed decode_threshold 8; make the builder"),
        ({}, {"c": [-1]}, ValueError, "trees: 'c' is not in the batch"),
        ({}, [-1], TypeError, "trees: .* is not a mapping of request to parents"),
        ([], {"a": [-1]}, TypeError, "scheduled: .* is not a mapping of request to tokens"),
        ({}, {"a": [-1, 1]}, ValueError, "trees: draft 1 of request 'a' has parent 1"),
        ({"b": 60}, {"a": TREE}, ValueError, ""),
    ],
)
def test_what_is_refused_changes_nothing(kernels, scheduled, trees, error, said):
    batch, builder = started(kernels)
    with pytest.raises(error, match=f"^{said}"):
        builder.build(scheduled, trees=trees)
    assert [batch.num_computed_tokens(name) for name in "ab"] == [5, 2]
    assert builder.last_step == -1
    metadata = builder.build()
    assert (metadata.tree_mask.tolist(), metadata.positions.tolist()) == ([0, 0], [5, 2])


def test_a_builder_without_trees_says_so():
    _, builder = started(trees=False)
    with pytest.raises(ValueError, match=r"^trees: this builder was made without draft_trees, so drafts form chains"):
        builder.build(trees={"a": [-1]})
    with pytest.raises(ValueError, match=r"^paths: this builder was made without draft_trees; batch.rollback_many"):
        builder.keep_paths({"a": []})
    metadata = builder.build()
    assert not hasattr(metadata, "tree_mask")
    assert not hasattr(metadata.host, "tree_mask")
    assert "tree_mask" not in metadata.asdict_zerocopy()


def test_what_a_builder_of_trees_cannot_be_made_with():
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=BLOCK)
    common = {"max_num_batched_tokens": 64, "draft_trees": True}
    with pytest.raises(ValueError, match=r"^draft_trees: decode_threshold 1 leaves room for no draft"):
        MetadataBuilder(batch, **common)
    with pytest.raises(TypeError, match=r"^draft_trees: "):
        MetadataBuilder(batch, max_num_batched_tokens=64, draft_trees="no")
    with pytest.raises(ValueError, match=r"^draft_trees: not with context_parallel; a rank has some of a tree's keys"):
        MetadataBuilder(batch, decode_threshold=4, context_parallel=ContextParallel(2, 0, block_size=2), **common)
    hybrid = InputBatch(max_num_reqs=4, max_model_len=64, groups=[KVCacheGroup("full", 4), StateGroup("mamba", 5)])
    with pytest.raises(ValueError, match=r"^decode_threshold: 4 given for drafts, but group 'mamba' holds states"):
        MetadataBuilder(hybrid, decode_threshold=4, **common)


@pytest.mark.parametrize("options", [{}, {"bucket": 2}, {"scheduled": {}}])
def test_a_builder_without_trees_says_so_on_each_path(kernels, options):
    """Steps of the same requests as the last one's are built by a shorter path."""
    batch, builder = started(kernels, trees=False)
    builder.capture(2)
    for _ in range(2):
        builder.build(bucket=options.get("bucket"))
        with pytest.raises(ValueError, match=r"^trees: this builder was made without draft_trees"):
            builder.build(**options, trees={"a": [-1]})
    assert [batch.num_computed_tokens(name) for name in "ab"] == [7, 4]


def test_the_largest_tree_arrives(kernels):
    """The last of its tokens has the mask's sign; padded rows and other requests have none."""
    batch, builder = new_builder(kernels, 64, max_num_batched_tokens=200)
    for row in range(2):
        batch.add_request(row, list(range(1 + 16 * row, 17 + 16 * row)), 0)
    metadata = builder.build({1: 3}, trees={0: list(range(-1, 62))})
    assert metadata_from_fields(metadata.asdict_zerocopy()).tree_mask.tolist() == metadata.tree_mask.tolist()
    builder.capture(3, query_len=4)
    batch.rollback(0, 64)
    metadata = builder.build({1: 0}, trees={0: [-1, 0, 0]}, bucket=3)
    assert metadata_from_fields(metadata.asdict_zerocopy()).tree_mask.tolist() == [1, 3, 7, 11, *[0] * 8]


def test_an_engines_field_may_not_take_the_name():
    _, builder = started(trees=False)
    with pytest.raises(ValueError, match=r"^name: 'tree_mask' is not a free name"):
        builder.register_field("tree_mask", "int64", "token", lambda metadata, out: None)


def test_a_window_must_not_have_passed_what_is_kept():
    groups = [KVCacheGroup("window", 4, sliding_window=2)]
    batch = InputBatch(max_num_reqs=2, max_model_len=64, groups=groups)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, decode_threshold=16, draft_trees=True)
    batch.add_request("a", {"window": [1, 2, 3, 4]}, 3)
    builder.build(trees={"a": [-1] * 9})
    batch.release_passed_blocks(num_rollback=4)
    for path in ([2], [0], []):  # of which the first alone moves anything
        with pytest.raises(ValueError, match=r"^paths: request 'a' rolled back to \d tokens would see block"):
            builder.keep_paths({"a": path})
    assert batch.num_computed_tokens("a") == 13


@pytest.mark.parametrize("between", ["nothing", "a refused step ahead", "a refused build"])
def test_steps_ahead_follow_a_tree_that_was_kept(between):
    """They have no tree: neither that of the step before, nor one of a build that was refused."""
    batch, builder = started(transport="copy")
    builder.capture(2)
    builder.build(trees={"a": TREE})
    if between == "a refused step ahead":
        with pytest.raises(ValueError, match=r"^trees: request 'a' ran a tree of 6 drafts, of which its first 6 count"):
            builder.run_ahead(2, bucket=2)
    assert builder.keep_paths({"a": [1, 3]}).tolist() == [[15, 14], [29, 15]]
    if between == "a refused build":
        with pytest.raises(ValueError, match=r"^block_table: row 1 "):
            builder.build({"b": 60}, trees={"a": TREE})
    steps = builder.run_ahead(2, bucket=2)
    assert not steps.first.host.tree_mask.any()
    assert [batch.num_computed_tokens(name) for name in "ab"] == [10, 5]


@pytest.mark.parametrize("call", ["build", "keep"])
def test_an_interrupted_call_has_happened_or_nothing_has(kernels, call):
    """Before every so many opcodes; what follows it goes on from one of the two."""
    count, outcomes, trees = 0, set(), {"a": TREE, "b": [-1, -1, 0]}
    while True:
        batch, builder = started(kernels)
        if call == "keep":
            builder.build(trees=trees)
        interrupted = AtOpcode(count)
        with interrupted:
            if call == "build":
                builder.build(trees=trees)
            else:
                builder.keep_paths({"a": [1, 3], "b": [1]})
        outcomes.add(computed := tuple(batch.num_computed_tokens(name) for name in "ab"))
        if computed == (5, 2):
            builder.build(trees=trees)
        if computed != (8, 4):
            assert builder.keep_paths({"a": [1, 3], "b": [1]}).tolist() == [[15, 14], [29, 15], [8, 7]]
        assert (builder.last_step, [batch.num_computed_tokens(name) for name in "ab"]) == (0, [8, 4])
        for name in "ab":
            with pytest.raises(ValueError, match=rf"^paths: request '{name}' has not run a tree"):
                builder.keep_paths({name: []})
        metadata = builder.build()
        assert (metadata.positions.tolist(), metadata.tree_mask.tolist()) == ([8, 4], [0, 0])
        if not interrupted.fired:
            break
        count += 11 if call == "build" else 3
    assert outcomes == {(5, 2) if call == "build" else (8, 4), (12, 6)}


@pytest.mark.parametrize("other_takes_trees", [False, True])
@pytest.mark.parametrize("bucket", [None, 2])
def test_another_builder_does_not_run_a_request_behind_an_unsettled_tree(kernels, other_takes_trees, bucket):
    batch, builder = started(kernels)
    other = MetadataBuilder(batch, max_num_batched_tokens=64, decode_threshold=8, draft_trees=other_takes_trees)
    last = other.capture(2).step
    builder.build({"b": 0}, trees={"a": TREE})
    for scheduled in ({}, {"b": 1}, {"a": 2}):
        with pytest.raises(ValueError, match="trees: request 'a' ran a tree of 6 drafts, of which its first 6 count"):
            other.build(scheduled, bucket=None if "a" in scheduled else bucket)
    assert (batch.num_computed_tokens("a"), batch.num_computed_tokens("b"), other.last_step) == (12, 2, last)
    assert other.build({"a": 0}, bucket=bucket).req_ids == ("b",)
    assert builder.keep_paths({"a": [1, 4]}).tolist() == [[15, 14], [30, 15]]
    assert sorted(other.build(bucket=bucket).positions.tolist()[:2]) == [3, 8]


@pytest.mark.parametrize("other_takes_trees", [False, True])
def test_a_tree_that_was_taken_back_is_forgotten_once_another_builder_runs_its_request(kernels, other_takes_trees):
    batch, builder = started(kernels)
    other = MetadataBuilder(batch, max_num_batched_tokens=64, decode_threshold=8, draft_trees=other_takes_trees)
    builder.build({"b": 0}, trees={"a": TREE})
    batch.rollback("a", 7)
    other.build({"a": 7, "b": 0})  # as many tokens as the tree had
    with pytest.raises(ValueError, match="paths: request 'a' has not run a tree in its last step"):
        builder.keep_paths({"a": [1, 4]})
    assert batch.num_computed_tokens("a") == 12


def test_where_an_interrupt_loses_the_moves_the_request_goes_back_to_its_root(kernels):
    """As docs/threads-and-processes.md says: nothing gives the moves again, and what was accepted runs once more."""
    batch, builder = started(kernels)
    builder.build({"b": 0}, trees={"a": TREE})
    builder.keep_paths({"a": [1, 3]})  # interrupted behind this: what it returned is lost
    assert batch.num_computed_tokens("a") == 8
    with pytest.raises(ValueError, match=r"^paths: request 'a' has not run a tree in its last step"):
        builder.keep_paths({"a": [1, 3]})
    batch.rollback_many({"a": 2})
    metadata = builder.build({"a": 3, "b": 0})  # the two accepted ones and what was sampled behind them
    assert metadata.positions.tolist() == [6, 7, 8]
    assert metadata.slot_mapping.tolist() == [14, 15, 28]
    assert metadata.tree_mask.tolist() == [0, 0, 0]
