"""Faults of draft trees; each names the test of the kit that must find it."""

from testing.faulty_backend import NOT_READ, USUAL_SCALE, Fault, forward

TREES = "features={'tree_mask', 'sliding_window', 'multi_token_decode'}"
SHAPE = "test_draft_trees_of_any_shape"
MOVED = "test_slots_are_moved_within_caches"


def masked(change: str) -> str:
    """A layer that reads other masks: ``change`` has ``seen``, bool (tokens, 64), of each tree, and may write to it."""
    return forward(f"""
masks = getattr(metadata.host, "tree_mask", None)
if masks is None or not masks.any():
    return whole(query, key, value, kv_cache, metadata, output)
masks, starts = np.array(masks), metadata.host.query_start_loc
for first, stop in zip(starts[:-1], starts[1:]):
    if first == stop or not masks[first]:
        continue
    bits = masks[first:stop].view(np.uint8).reshape(-1, 8)
    seen = np.unpackbits(bits, axis=1, bitorder="little").astype(bool)
    depth, token = seen.sum(axis=1), np.arange(stop - first)
    {change}
    masks[first:stop] = np.packbits(seen, axis=1, bitorder="little").view(np.int64).ravel()
return whole(query, key, value, kv_cache, changed(metadata, tree_mask=masks), output)
""")


def moving(body: str) -> str:
    """A backend that moves tokens otherwise; ``moves`` is int64[n, 2]."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"\ndef move_slots(self, kv_caches, moves):\n{lines}\nBackend.move_slots = move_slots\n"


TREE_FAULTS = (
    Fault(
        "trees_with_the_usual_scale",
        "test_draft_trees_over_random_batches",
        "differs",
        forward(USUAL_SCALE.format(where="np.any(getattr(metadata.host, 'tree_mask', None))")),
        TREES,
    ),
    Fault(
        "tree_mask_not_read",
        f"{SHAPE}[binary]",
        "; it is as if each token saw all before it, siblings too: tree_mask was not read",
        forward(
            "return whole(query, key, value, kv_cache, changed(metadata, tree_mask=metadata.host.tree_mask * 0) "
            "if hasattr(metadata.host, 'tree_mask') else metadata, output)"
        ),
        TREES,
    ),
    Fault(
        "tree_mask_not_read_beside_prompts",
        "test_draft_trees_over_random_batches",
        "differs",
        forward(
            "hidden = hasattr(metadata.host, 'tree_mask') and metadata.num_prefills\n"
            "return whole(query, key, value, kv_cache, changed(metadata, tree_mask=metadata.host.tree_mask * 0) "
            "if hidden else metadata, output)"
        ),
        TREES,
    ),
    Fault(
        "tree_mask_by_depth",
        f"{SHAPE}[two chains]",
        "; it is as if each token saw those of lesser depth, not its ancestors alone",
        masked("seen[:, : len(token)] = (depth[None] < depth[:, None]) | (token[None] == token[:, None])"),
        TREES,
    ),
    Fault(
        "siblings_that_see_each_other",
        f"{SHAPE}[siblings]",
        "; it is as if siblings saw each other",
        masked("seen[1:, 1 : len(token)] |= (depth[None, 1:] == 2) & (depth[1:, None] == 2)"),
        TREES,
    ),
    Fault(
        "tree_of_single_tokens",
        "test_draft_trees_over_random_batches",
        "differs",
        masked("seen[:, : len(token)] = token[None] == token[:, None]"),
        TREES,
    ),
    Fault(
        "tree_without_its_root",
        f"{SHAPE}[comb]",
        "; it is as if the root were hidden",
        masked("seen[1:, 0] = False"),
        TREES,
    ),
    Fault(
        "tree_mask_of_32_bits",
        f"{SHAPE}[last bit]",
        "differs",
        masked("seen[:, 32:] = False; seen[32:, 31] = True"),
        TREES,
    ),
    Fault(
        "tree_positions_by_index",
        "test_draft_trees_with_a_feature[sliding_window]",
        "sliding_window 6",
        masked("seen[:, : len(token)] &= (token[:, None] - token[None] < 6) | (self.sliding_window is None)"),
        TREES,
    ),
    Fault("kept_tokens_that_stay", "test_a_kept_path_is_decoded_from", "differs", moving("pass"), TREES),
    Fault(
        "kept_tokens_moved_one_after_another",
        "test_a_kept_path_is_decoded_from",
        "differs",
        moving(
            """
for pair in moves[::-1]:
    super(Backend, self).move_slots(kv_caches, pair[None])
"""
        ),
        TREES,
    ),
    Fault(
        "kept_keys_without_values",
        "test_a_kept_path_is_decoded_from",
        "differs",
        moving(
            """
before = [cache[1].clone() for cache in kv_caches]
super(Backend, self).move_slots(kv_caches, moves)
for cache, values in zip(kv_caches, before):
    cache[1] = values
"""
        ),
        TREES,
    ),
    Fault(
        "tokens_moved_in_the_first_cache_alone",
        MOVED,
        "in the cache of layer 1: every cache once",
        moving("super(Backend, self).move_slots(kv_caches[:1], moves)"),
        TREES,
    ),
    Fault(
        "tokens_moved_in_the_order_given",
        MOVED,
        "slot 5 should hold what slot 4 held",
        moving("for pair in moves:\n    super(Backend, self).move_slots(kv_caches, pair[None])"),
        TREES,
    ),
    Fault(
        "tokens_moved_from_the_last_to_the_first",
        MOVED,
        "slot 12 should hold what slot 23 held",
        moving("for pair in moves[::-1]:\n    super(Backend, self).move_slots(kv_caches, pair[None])"),
        TREES,
    ),
    Fault(
        "tokens_moved_twice_where_two_layers_have_the_cache",
        MOVED,
        "slot 5 should hold what slot 4 held, in the cache that layers 0, 2 and 3 have together",
        moving("for cache in kv_caches:\n    super(Backend, self).move_slots([cache], moves)"),
        TREES,
    ),
    Fault(
        "tokens_moved_by_a_class_of_no_tree_mask",
        MOVED,
        "in the cache of layer 1: every cache once",
        moving("super(Backend, self).move_slots(kv_caches[:1], moves)"),
    ),
    Fault(
        "tokens_of_latent_caches_moved_twice",
        "test_latent_slots_are_moved",
        "slot 5 should hold what slot 4 held, in the cache that layers 0, 2 and 3 have together",
        moving("""
for cache in kv_caches if self.config.use_mla else [kv_caches]:
    super(Backend, self).move_slots([cache] if self.config.use_mla else cache, moves)
"""),
        f"{TREES}, use_mla=True, head_size_v=MultipleOf(4)",
    ),
    Fault(
        "tree_mask_not_read_without_writing",
        "test_draft_trees_by_another_method[write=False]",
        "; it is as if each token saw all before it, siblings too: tree_mask was not read",
        NOT_READ.format(where="not write", name="forward", field="tree_mask"),
        TREES,
    ),
    Fault(
        "tree_mask_not_read_with_the_log_sum_exp",
        "test_draft_trees_by_another_method[forward_with_lse]",
        "; it is as if each token saw all before it, siblings too: tree_mask was not read",
        NOT_READ.format(where="True", name="forward_with_lse", field="tree_mask"),
        "features={'tree_mask', 'multi_token_decode', 'lse'}",
    ),
)
