"""Every public integer parameter and a call that passes it, for test_integers.py."""

import inspect
import re

import numpy as np
import torch

import attncore
from attncore import builder, slots
from attncore.dense import dense_attention
from attncore.reference import ReferenceBackend, cache
from attncore.replay.scheduling.draft_model import Speculation
from attncore.replay.settings import Settings

LENS, TABLE = [3, 5], [[1, 2], [3, 4]]


# ---- what is public --------------------------------------------------------------------------------------------------


def parameters():
    """Names such as ``InputBatch.rollback:num_tokens`` of every public parameter whose annotation says ``int``."""
    names = set()
    for module in (attncore, builder, slots):
        for public in module.__all__:
            value = getattr(module, public)
            if getattr(value, "__module__", "").startswith("attncore"):
                names |= set(of_callable(public, value))
    for value in (dense_attention, Settings, Speculation, cache.cache_shape, cache.allocate, cache.key_value):
        names |= set(of_callable(value.__name__, value))
    return (
        names | set(of_callable("copy_blocks", cache.copy_blocks)) | set(of_callable("swap_blocks", cache.swap_blocks))
    )


def of_callable(name, value):
    if inspect.isfunction(value):
        yield from of_signature(name, value)
    elif inspect.isclass(value) and not issubclass(value, (Exception, dict)):
        if "__dataclass_fields__" in vars(value):  # BackendSpec hides its fields behind *args
            annotations = {field.name: str(field.type) for field in vars(value)["__dataclass_fields__"].values()}
            yield from (f"{name}:{field}" for field, text in annotations.items() if is_integer(text))
        else:
            yield from of_signature(name, value)
        for member in dir(value):
            method = inspect.getattr_static(value, member)
            method = getattr(method, "__func__", method)
            if not member.startswith("_") and inspect.isfunction(method) and "attncore" in method.__module__:
                yield from of_signature(f"{name}.{member}", method)


def of_signature(name, function):
    for parameter in inspect.signature(function).parameters.values():
        if is_integer(str(parameter.annotation)):
            yield f"{name}:{parameter.name}"


def is_integer(annotation):
    return re.search(r"\bint\b", annotation) is not None


# ---- calls -----------------------------------------------------------------------------------------------------------


def batch(**other):
    made = builder.InputBatch(**{"max_num_reqs": 4, "max_model_len": 64, "block_size": 4, "num_blocks": 200} | other)
    made.add_request("a", [7, 8, 9], 9)
    made.add_request("b", [5, 6], 3)
    return made


def grouped(**field):
    group = builder.KVCacheGroup("g", **{"block_size": 8} | field)
    made = builder.InputBatch(max_num_reqs=2, max_model_len=64, groups=[group])
    return made.groups, made.nbytes


def steps(over=None, **settings):
    return builder.MetadataBuilder(over or batch(), **{"max_num_batched_tokens": 32, "decode_threshold": 8} | settings)


def captured(call):
    made = steps()
    made.capture(3, 1)
    return call(made)


def step(metadata):
    """What a step says."""
    names = ("slot_mapping", "seq_lens", "query_lens")
    return [np.asarray(getattr(metadata.host, name)).tolist() for name in names], metadata.num_tokens


def mutated(made, call):
    """The result of a call on a batch, and the batch afterwards."""
    result = call(made)
    held = {name: (made.block_ids(name), made.num_computed_tokens(name)) for name in made.req_ids}
    return plain(result), held, made.req_ids


def state(call):
    made = builder.CommonMetadataBuilder(4, max_seq_len_to_capture=32)
    kept = attncore.AttentionState(builder=made)
    with kept.graph_capture(8):
        kept.metadata_for_capture(3)
        return call(kept)


def listed(cuda_graph_pad_size=-1, sequence=(1, 1, 6, (5, 6)), **settings):
    made = builder.CommonMetadataBuilder(**{"block_size": 4, "max_seq_len_to_capture": 32} | settings)
    group = builder.SequenceGroup(False, [builder.Sequence(*sequence)])
    return step(made.build([group], cuda_graph_pad_size)), made.max_seq_len_to_capture, made.block_size


def encoded(length, capture=None):
    made = builder.CommonMetadataBuilder(
        4, encoder_decoder=True, max_seq_len_to_capture=32, max_encoder_seq_len_to_capture=capture
    )
    group = builder.SequenceGroup(False, [builder.Sequence(1, 1, 6, [5, 6])], False, length, [3, 4])
    return made.build([group], 1).host.cross_block_table.tolist()


def advanced(call):
    metadata = builder.CommonMetadataBuilder(4).build([builder.SequenceGroup(False, [builder.Sequence(1, 1, 1, [5])])])
    call(metadata)
    return step(metadata)


def ranks(**field):
    made = builder.ContextParallel(**{"world_size": 2, "rank": 1, "block_size": 4, "interleave": 2} | field)
    return made, made.seq_lens([3, 90]).tolist(), type(made.virtual_block_size)


def virtual(**field):
    return builder.ContextParallel.of_virtual_blocks(
        **{"virtual_block_size": 8, "world_size": 2, "rank": 1, "interleave": 2} | field
    )


def sliced(*values, block_size=None):
    return step(builder.slice_metadata(steps().build(), builder.BatchSlice(*values), block_size=block_size))


def request(**field):
    given = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"} | field
    return attncore.AttentionRequest(**given)


def config(**field):
    given = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "block_size": 4}
    return attncore.BackendConfig(**given | field)


def spec(**field):
    given = {
        "name": "x", "api": 1, "factory": "m:C", "devices": {"any": 0}, "dtypes": {"float32"},
        "head_sizes": attncore.MultipleOf(1), "block_sizes": attncore.MultipleOf(1),
    }  # fmt: skip
    made = attncore.BackendSpec(**given | field)
    return [getattr(made, name) for name in given | field]


def backend():
    return ReferenceBackend(config())


def dense(window, spans=()):
    rows = torch.arange(24.0).reshape(6, 1, 4).sin()
    return dense_attention(rows, rows, rows, scale=0.5, sliding_window=window, spans=spans).tolist()


def spanned(end):
    made = batch(spans=True)
    made.set_spans("a", [(2, end)])
    return made.spans("a")


def slots_of_one(**given):
    found = []
    slots.compute_slot_mapping(
        **{
            "is_profile_run": False, "slot_mapping": found, "seq_id": 1, "seq_len": 6, "context_len": 1,
            "start_idx": 2, "block_size": 4, "block_tables": {1: [5, 6]},
        } | given
    )  # fmt: skip
    return found


def start_of(**given):
    fixed = {"is_prompt": True, "query_len": 9, "context_len": 0, "sliding_window": 4}
    return slots.compute_slot_mapping_start_idx(**fixed | given)


def mapped(**field):
    placed = {"item": 0, "offset": 1, "length": 2, "embedding_start": 3} | field
    return builder.placeholder_map([[builder.Placeholder(**placed)]], [0], [9])


def rule(**field):
    given = builder.CascadeRule(**{"min_requests": 2, "min_prefix_tokens": 2, "min_saving": 0.0} | field)
    return prefix(rule=given)


def prefix(table=((1, 2), (1, 3)), context_lens=(8, 8), block_size=4, rule=None, **null):
    rule = rule or builder.CascadeRule(2, 1, 0.0)
    found = builder.find_shared_prefix(table, context_lens, block_size, rule, **null)
    return found and (found.rows.tolist(), *map(plain, found[1:]))


def cascade(**field):
    shared = builder.SharedPrefix(**{"rows": np.arange(2), "num_blocks": 1, "num_tokens": 4} | field)
    return plain(builder.plan_cascade(shared, [[1, 2], [1, 3]], [1, 1], [6, 7]))


def cache_of(call, **size):
    return call(**{"num_blocks": 3, "block_size": 4, "num_kv_heads": 2, "head_size": 8} | size)


def moved(dim):
    tensor = torch.arange(2 * 4 * 4 * 1 * 2.0).reshape(2, 4, 4, 1, 2)
    cache.copy_blocks(tensor, [(0, 1)], block_dim=dim)
    return tensor.tolist()


def swapped(dim):
    tensor = torch.arange(2 * 4 * 4 * 1 * 2.0).reshape(2, 4, 4, 1, 2)
    other = torch.zeros_like(tensor)
    cache.swap_blocks(tensor, other, [(0, 1)], block_dim=dim)
    return other.tolist()


def plain(value):
    """``value`` with lists in place of arrays; the types of numbers stay."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    return value
