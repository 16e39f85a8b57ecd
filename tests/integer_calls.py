"""CALLS: for every public integer parameter a value that it takes and a call that passes it, for test_integers.py."""

import integers as call
import numpy as np
from builder.plain_backend import Least, config
from integers import batch, captured, mutated, state, step, steps

import attncore
from attncore import builder, slots
from attncore.reference import cache
from attncore.replay.scheduling.draft_model import Speculation
from attncore.replay.settings import Settings


def of(function, name, *fixed, **given):
    """A call of ``function`` that passes its value by ``name``."""
    return lambda value: call.plain(function(*fixed, **given, **{name: value}))


def each(prefix, function, values, *fixed, **given):
    """Entries for several parameters of one function."""
    return {f"{prefix}:{name}": (value, of(function, name, *fixed, **given)) for name, value in values.items()}


def built(**sizes):
    made = batch(**sizes)
    return made.nbytes, step(steps(made).build())


PERSISTENT = {
    "InputBatch:max_num_reqs": (5, lambda n: built(max_num_reqs=n)),
    "InputBatch:max_model_len": (60, lambda n: batch(max_model_len=n).nbytes),
    "InputBatch:block_size": (5, lambda n: built(block_size=n)),
    "InputBatch:num_blocks": (10, lambda n: mutated(batch(num_blocks=n), lambda m: m.append_blocks("b", [9]))),
    "InputBatch:max_encoder_len": (13, lambda n: builder.InputBatch(
        max_num_reqs=2, max_model_len=8, max_encoder_len=n,
        groups=[builder.KVCacheGroup("g", 4), builder.KVCacheGroup("x", 4, cross=True)]).nbytes),
    "InputBatch.add_request:num_computed_tokens": (4, lambda n: mutated(batch(), lambda m: m.add_request("c", [1], n))),
    "InputBatch.add_request:encoder_seq_len": (0, lambda n: mutated(
        batch(), lambda m: m.add_request("c", [1], encoder_seq_len=n))),
    "InputBatch.release_passed_blocks:num_rollback": (1, lambda n: mutated(
        windowed(), lambda m: list(m.release_passed_blocks(n).items()))),
    "InputBatch.replace_block:index": (1, lambda n: mutated(batch(), lambda m: m.replace_block("a", n, 3))),
    "InputBatch.replace_block:block_id": (100, lambda n: mutated(batch(), lambda m: m.replace_block("a", 1, n))),
    "InputBatch.rollback:num_tokens": (2, lambda n: mutated(batch(), lambda m: m.rollback("a", n))),
    "InputBatch.rollback_many:num_tokens": (2, lambda n: mutated(batch(), lambda m: m.rollback_many({"a": n}))),
    "InputBatch.set_spans:spans": (4, call.spanned),
    "InputBatch.swap_rows:i": (1, lambda n: mutated(batch(), lambda m: m.swap_rows(n, 0))),
    "InputBatch.swap_rows:j": (1, lambda n: mutated(batch(), lambda m: m.swap_rows(0, n))),
    "InputBatch.truncate_blocks:num_blocks": (3, lambda n: mutated(batch(), lambda m: m.truncate_blocks("a", n))),
    **each("KVCacheGroup", call.grouped,
           {"block_size": 16, "kernel_block_size": 2, "sliding_window": 9, "num_blocks": 100}),
    "MetadataBuilder:max_num_batched_tokens": (32, lambda n: step(steps(max_num_batched_tokens=n).build())),
    "MetadataBuilder:max_num_encoder_tokens": (32, lambda n: steps(max_num_encoder_tokens=n).max_num_encoder_tokens),
    "MetadataBuilder:decode_threshold": (2, lambda n: steps(decode_threshold=n).build({"a": 2}).num_decodes),
    "MetadataBuilder:depth": (3, lambda n: steps(depth=n).nbytes),
    "MetadataBuilder.build:scheduled": (2, lambda n: step(steps().build({"a": n}))),
    "MetadataBuilder.build:query_len": (2, lambda n: step(steps().build(query_len=n))),
    "MetadataBuilder.build:bucket": (3, lambda n: captured(lambda m: step(m.build(bucket=n)))),
    "MetadataBuilder.build_empty:bucket": (3, lambda n: captured(lambda m: step(m.build_empty(n)))),
    "MetadataBuilder.build_profile:query_lens": (5, lambda n: step(steps().build_profile([n, 2]))),
    "MetadataBuilder.capture:num_reqs": (4, lambda n: captured(lambda m: (step(m.capture(n)), m.captured))),
    "MetadataBuilder.capture:num_tokens": (
        4, lambda n: captured(lambda m: (step(m.capture(2, num_tokens=n)), m.captured)),
    ),
    "MetadataBuilder.capture:query_len": (2, lambda n: captured(lambda m: step(m.capture(2, n)))),
    "MetadataBuilder.run_ahead:num_steps": (3, lambda n: ahead(n)),
    "MetadataBuilder.run_ahead:bucket": (3, lambda n: ahead(2, bucket=n)),
    "MetadataBuilder.run_ahead:scheduled": (0, lambda n: ahead(2, scheduled={"b": n})),
    "InputBatch.token_column:width": (2, lambda n: drafted(batch().token_column("ids", width=n))),
    "InputBatch.token_column:unknown": (5, lambda n: unwritten(n)),
    "MetadataBuilder.release:num_reqs": (3, lambda n: captured(lambda m: (m.release(n), m.captured))),
}  # fmt: skip


def unwritten(unknown):
    """The value of a request that is added, in a token column that ``unknown`` is a number of."""
    made = builder.InputBatch(max_num_reqs=1, max_model_len=8, block_size=4)
    column = made.token_column("ids", unknown=unknown)
    made.add_request("a", [1])
    return column["a"]


def ahead(num_steps, bucket=3, **scheduled):
    """What run_ahead gives over the transport ``copy``, with 3 rows captured."""
    made = builder.MetadataBuilder(batch(), Least(config()), max_num_batched_tokens=32, transport="copy")
    made.capture(3)
    steps_ahead = made.run_ahead(num_steps, bucket=bucket, **scheduled)
    return len(steps_ahead), step(steps_ahead.first), steps_ahead[len(steps_ahead) - 1].seq_lens.tolist()


def drafted(column):
    """A column of as many drafts as it has room for."""
    column.give("a", [0] * 9 + [7])
    return len(np.atleast_1d(column["a"])), repr(column)


def windowed():
    made = builder.InputBatch(max_num_reqs=2, max_model_len=64, groups=[builder.KVCacheGroup("g", 4, sliding_window=4)])
    made.add_request("a", {"g": [7, 8, 9]}, 10)
    return made


def adopted(method=lambda made: made.nbytes, **changes):
    """What ``method`` gives of AdoptedSteps, which have 3 rows of 2 tokens captured."""
    sizes = {"max_num_reqs": 5, "max_num_tokens": 16, "max_model_len": 60, "num_blocks": 9, "decode_threshold": 2}
    made = attncore.AdoptedSteps(Least(config()), **(sizes | changes))
    made.capture(3, 2)
    return method(made), made.captured, made.batch


ADOPTED = {
    "AdoptedSteps:max_num_reqs": (7, lambda n: adopted(max_num_reqs=n)),
    "AdoptedSteps:max_num_tokens": (9, lambda n: adopted(max_num_tokens=n)),
    "AdoptedSteps:max_model_len": (70, lambda n: adopted(lambda made: repr(made), max_model_len=n)),
    "AdoptedSteps:num_blocks": (11, lambda n: adopted(num_blocks=n)),
    "AdoptedSteps:decode_threshold": (3, lambda n: adopted(lambda made: made.capture(2, 3), decode_threshold=n)),
    "AdoptedSteps:depth": (3, lambda n: adopted(depth=n)),
    "AdoptedSteps.capture:num_reqs": (4, lambda n: adopted(lambda made: made.capture(n))),
    "AdoptedSteps.capture:query_len": (2, lambda n: adopted(lambda made: made.capture(4, n))),
    "AdoptedSteps.release:num_reqs": (3, lambda n: adopted(lambda made: made.release(n))),
}
LISTS = {
    **each("CommonMetadataBuilder", call.listed, {"block_size": 5, "sliding_window": 5}),
    "CommonMetadataBuilder:max_seq_len_to_capture": (32, lambda n: call.listed(0, max_seq_len_to_capture=n)),
    "CommonMetadataBuilder:max_encoder_seq_len_to_capture": (8, lambda n: call.encoded(5, n)),
    "CommonMetadataBuilder.build:cuda_graph_pad_size": (2, call.listed),
    "CommonMetadataBuilder.advance_step:num_queries": (
        1, lambda n: call.advanced(lambda m: builder.CommonMetadataBuilder(4).advance_step(m, num_queries=n))),
    "CommonAttentionMetadata.advance_step:num_queries": (
        1, lambda n: call.advanced(lambda m: m.advance_step(num_queries=n))),
    "advance_step:num_queries": (1, lambda n: call.advanced(lambda m: builder.advance_step(m, num_queries=n))),
    "Sequence:seq_id": (7, lambda n: call.listed(sequence=(n, 1, 6, [5, 6]))),
    "Sequence:query_len": (1, lambda n: call.listed(sequence=(7, n, 6, [5, 6]))),
    "Sequence:context_len": (6, lambda n: call.listed(sequence=(7, 1, n, [5, 6]))),
    "Sequence:block_table": (6, lambda n: call.listed(sequence=(7, 1, 6, [5, n]))),
    "SequenceGroup:encoder_seq_len": (5, call.encoded),
    "SequenceGroup:cross_block_table": (3, lambda n: builder.CommonMetadataBuilder(4, encoder_decoder=True).build(
        [builder.SequenceGroup(False, [builder.Sequence(1, 1, 6, [5, 6])], False, 5, [n, 4])]
    ).host.cross_block_table.tolist()),
}  # fmt: skip
_STATE = {
    "build:cuda_graph_pad_size": (2, lambda n: state(lambda kept: step(kept.build(
        [builder.SequenceGroup(False, [builder.Sequence(1, 1, 6, [5, 6])])], n)))),
    "graph_capture:max_batch_size": (4, lambda n: builder.CommonAttentionState(
        builder=builder.CommonMetadataBuilder(4, max_seq_len_to_capture=8)).graph_capture(n).__enter__()),
    "graph_clone:batch_size": (3, lambda n: state(lambda kept: kept.graph_clone(n).captured)),
    "metadata_for_capture:batch_size": (4, lambda n: state(lambda kept: step(kept.metadata_for_capture(n)))),
    "graph_capture_get_metadata_for_batch:batch_size": (
        4, lambda n: state(lambda kept: step(kept.graph_capture_get_metadata_for_batch(n)))),
    "pad_size:num_reqs": (2, lambda n: state(lambda kept: kept.pad_size(n))),
}  # fmt: skip
LISTS |= {
    f"{name}.{key}": entry for key, entry in _STATE.items() for name in ("AttentionState", "CommonAttentionState")
}

BLOCKS = {
    **each("ContextParallel", call.ranks,
           {"world_size": 4, "rank": 0, "block_size": 64, "interleave": 4, "tensor_parallel_size": 4}),
    **each("ContextParallel.of_virtual_blocks", call.virtual,
           {"virtual_block_size": 16, "world_size": 4, "rank": 0, "interleave": 1}),
    "ContextParallel.positions:seq_len": (9, lambda n: call.ranks()[0].positions(n).tolist()),
    **{f"BatchSlice:{name}": (value, lambda n, at=at: call.sliced(*(0, 2, 0, 2)[:at], n, *(0, 2, 0, 2)[at + 1 :]))
       for at, (name, value) in enumerate({"req_start": 0, "req_stop": 2, "token_start": 0, "token_stop": 2}.items())},
    "slice_metadata:block_size": (4, lambda n: call.sliced(0, 2, 0, 2, block_size=n)),
    "slice_by_requests:num_slices": (2, lambda n: builder.slice_by_requests(call.LENS, n)),
    "slice_by_tokens:num_slices": (3, lambda n: builder.slice_by_tokens(call.LENS, n)),
    **each("CascadeRule", call.rule, {"min_requests": 2, "min_prefix_tokens": 3}),
    **each("SharedPrefix", call.cascade, {"num_blocks": 1, "num_tokens": 4}),
    **each("find_shared_prefix", call.prefix, {"block_size": 4, "null_block": 2}),
    **each("count_common_blocks", builder.count_common_blocks, {"block_size": 4, "null_block": 2}, [[1, 2]], [8])
    | {"count_common_blocks:null_block": (2, lambda n: builder.count_common_blocks([[1, 2]], [8], 4, null_block=n))},
    **each("Placeholder", call.mapped, {"item": 3, "offset": 2, "length": 3, "embedding_start": 4}),
    **each("PlaceholderMap.of_tokens", lambda **given: call.mapped().of_tokens(
        **{"start": 1, "stop": 9, "first_row": 0} | given), {"start": 2, "stop": 2, "first_row": 0}),
    "state_chunks:chunk_size": (3, lambda n: call.plain(builder.state_chunks([5, 2], n))),
    "StateGroup:num_slots": (4, lambda n: builder.InputBatch(
        max_num_reqs=2, max_model_len=8, groups=[builder.KVCacheGroup("g", 4), builder.StateGroup("s", n)]).nbytes),
    **{f"{name}:decode_threshold": (3, lambda n, name=name: call.plain(getattr(builder, name)(call.LENS, [0, 9], n)))
       for name in ("classify_requests", "reorder_batch", "split_three_ways")},
    **{f"{name}:extend_threshold": (5, lambda n, name=name: call.plain(getattr(builder, name)(call.LENS, [0, 9], 3, n)))
       for name in ("classify_requests", "reorder_batch", "split_three_ways")},
    "split_decodes_and_prefills:decode_threshold": (3, lambda n: builder.split_decodes_and_prefills(call.LENS, n)),
    "rows_after:num_rows": (3, lambda n: builder.rows_after([[0, 2]], n).tolist()),
    **each("context_chunks", lambda **given: builder.context_chunks(
        call.TABLE, [5, 8], **{"block_size": 4, "workspace_tokens": 9} | given),
        {"block_size": 4, "workspace_tokens": 8}),
    "context_chunk_metadata:index": (1, lambda n: chunk(n)),
    "expand_blocks:kernel_blocks": (100, lambda n: builder.expand_blocks([3], n).tolist()),
    **each("kernel_blocks_per_block", lambda **given: builder.kernel_blocks_per_block(
        **{"manager_block_size": 16, "kernel_block_size": 4} | given),
        {"manager_block_size": 32, "kernel_block_size": 8}),
    **each("local_attention_batches", lambda **given: builder.local_attention_batches(
        [2, 1], [7, 5], call.TABLE, **{"chunk_size": 4, "block_size": 4} | given),
        {"chunk_size": 4, "block_size": 4}),
    **each("local_attention_metadata", lambda **given: step(builder.local_attention_metadata(
        steps().build(), **{"chunk_size": 4, "block_size": 4} | given)), {"chunk_size": 4, "block_size": 4}),
}  # fmt: skip


def chunk(index):
    made = batch()
    made.append_blocks("b", [1, 2])
    metadata = steps(made, decode_threshold=1).build(query_len=2)
    chunks = builder.context_chunks(metadata.host.block_table, metadata.host.context_lens, 4, 8)
    return step(builder.context_chunk_metadata(metadata, chunks, index))


_SIZES = {"num_blocks": 5, "block_size": 8, "num_kv_heads": 3, "head_size": 16}
OTHERS = {
    "compute_slot_mapping:block_tables": (5, lambda n: call.slots_of_one(block_tables={1: [n, 6]})),
    **each("compute_slot_mapping", call.slots_of_one,
           {"seq_len": 7, "context_len": 2, "start_idx": 3, "block_size": 5}),
    **each("compute_slot_mapping_start_idx", call.start_of, {"query_len": 8, "context_len": 2, "sliding_window": 3}),
    "build_page_lists:block_size": (4, lambda n: call.plain(slots.build_page_lists(call.TABLE, [3, 7], n))),
    "build_slot_mapping:block_size": (4, lambda n: slots.build_slot_mapping(call.TABLE, [0, 4], [3, 2], n).tolist()),
    "pad_block_table:rows": (100, lambda n: slots.pad_block_table([[n, 2], [3]]).tolist()),
    "pad_block_table:width": (3, lambda n: slots.pad_block_table([[1, 2], [3]], n).tolist()),
    **each("AttentionRequest", call.request, {
        "num_heads": 6, "num_kv_heads": 1, "head_size": 64, "head_size_v": 9, "block_size": 8, "manager_block_size": 16,
        "max_model_len": 9, "num_blocks": 100, "sliding_window": 3}),
    **each("BackendConfig", call.config, {
        "num_heads": 6, "num_kv_heads": 1, "head_size": 64, "head_size_v": 9, "block_size": 8, "max_model_len": 9,
        "sliding_window": 3}),
    "BackendSpec:devices": (5, lambda n: call.spec(devices={"any": n})),
    "BackendSpec:head_sizes": (5, lambda n: call.spec(head_sizes=[n])),
    "BackendSpec:block_sizes": (5, lambda n: call.spec(block_sizes=[n])),
    "BackendSpec:head_size_v": (5, lambda n: call.spec(head_size_v=[n])),
    **each("BackendSpec", call.spec, {
        "preferred_block_size": 5, "max_group_size": 5, "max_model_len": 5, "max_block_id": 5, "workspace_bytes": 5,
        "pad_seq_len": 1}),
    "MultipleOf:base": (4, lambda n: str(attncore.MultipleOf(n))),
    "MultipleOf:maximum": (8, lambda n: str(attncore.MultipleOf(4, n))),
    "Host:device_count": (2, lambda n: attncore.Host(device="cpu", device_count=n)),
    "AttentionBackend.allocate_kv_cache:num_blocks": (3, lambda n: call.backend().allocate_kv_cache(n).shape),
    "AttentionBackend.impl:sliding_window": (3, lambda n: repr(vars(windowed_layer(n))["sliding_window"])),
    **{f"AttentionBackend.{method}:{name}": (value, lambda n, method=method, name=name: call.cache_of(
        getattr(call.backend(), method), **{name: n}))
       for method in ("kv_cache_shape", "get_kv_cache_shape") for name, value in _SIZES.items()},
    "dense_attention:sliding_window": (3, call.dense),
    "dense_attention:spans": (4, lambda n: call.dense(2, [(1, n)])),
    **{f"Settings:{name}": (5, lambda n, name=name: Settings(**{name: n})) for name in (
        "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "verify_every", "seed", "world_size",
        "interleave")},
    "Speculation:num_drafts": (2, Speculation),
    **{f"cache_shape:{name}": (value, lambda n, name=name: call.cache_of(cache.cache_shape, **{name: n}))
       for name, value in {**_SIZES, "head_size_v": 4}.items()},
    **{f"allocate:{name}": (value, lambda n, name=name: call.cache_of(
        cache.allocate, dtype=call.torch.float32, **{name: n}).shape)
       for name, value in {**_SIZES, "head_size_v": 4}.items()},
    "key_value:head_size_v": (3, lambda n: cache.key_value(call.torch.zeros(2, 4, 1, 8), n)[1].shape),
    "copy_blocks:block_dim": (1, call.moved),
    "swap_blocks:block_dim": (1, call.swapped),
}  # fmt: skip


def windowed_layer(window):
    return call.backend().impl("layer", scale=1.0, sliding_window=window)


CALLS = PERSISTENT | ADOPTED | LISTS | BLOCKS | OTHERS
"""By parameter: a value, which int8 holds, and a call with it. What two calls with equal integers return is equal."""

RESULT = "made by attncore and returned; nothing is computed from one that a caller makes"
NOT_CONVERTED = {
    "compute_slot_mapping:seq_id": "a key of block_tables",
    "compute_slot_mapping:slot_mapping": "a list that is appended to",
    "is_block_tables_empty:block_tables": "asks for None alone",
    "attention:head_size_v": "the last size of a new tensor: torch checks it, and the operator can be traced",
    "AttentionImpl:sliding_window": "AttentionBackend.impl has converted it",
    "BackendSpec:api": "a version of the contract, which has to be a plain int",
    "Option:default": "checked by Option.type, which says int and means it",
    "Option:choices": "the same",
    "PlanKey:sliding_window": RESULT,
    "Choice:block_size": RESULT,
    **{f"PlaceholderRun:{name}": RESULT for name in builder.PlaceholderRun._fields},
    **{f"{kind.__name__}:{name}": RESULT
       for kind in (builder.DecodePrefillSplit, builder.ThreeWaySplit) for name in kind._fields},
}  # fmt: skip
