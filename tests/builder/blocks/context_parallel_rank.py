"""One rank of test_two_ranks: ``context_parallel_rank.py RANK WORLD_SIZE INTERLEAVE STORE``. Prints what rank 0 found.

Rank 0 builds each step's metadata and broadcasts it; every rank writes and reads its own shard of the cache; partial
outputs are gathered and merged. Rank 0 also runs the same batch whole, on the reference backend.
"""

import json
import sys

import torch
import torch.distributed as dist

from attncore.abstract import BackendConfig
from attncore.builder import ContextParallel, InputBatch, MetadataBuilder, metadata_from_fields
from attncore.merge import merge_attention
from attncore.reference import ReferenceBackend

BLOCK, HEADS, KV_HEADS, SIZE, SCALE = 4, 4, 2, 8, 0.3
STEPS = [{"a": 21, "b": 3}, {"c": 9}, {}, {"b": 4}, {}, {"a": 0}, {"a": 13, "c": 5}, {}]


def backend_of(block_size):
    return ReferenceBackend(BackendConfig(HEADS, KV_HEADS, SIZE, "float32", block_size))


def steps(world_size):
    """The steps of three requests on one rank, with the backend that runs them whole."""
    backend = backend_of(BLOCK * world_size)
    batch = InputBatch(max_num_reqs=3, max_model_len=128, block_size=BLOCK * world_size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64)
    free = iter([11, 3, 8, 5, 17, 2, 9, 14, 1, 6, 12, 4, 7, 10, 13, 15, 16, 18, 19])
    for name in "abc":
        batch.add_request(name, [next(free) for _ in range(6)])
    for scheduled in STEPS:
        yield backend, builder.build({"c": 0} | scheduled if scheduled is STEPS[0] else scheduled)


def broadcast(fields):
    """Rank 0's fields on every rank: counts and shapes as an object, then each array as it lies."""
    header = [None]
    if fields is not None:
        arrays = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
        shapes = {name: (value.shape, value.dtype) for name, value in arrays.items()}
        header = [({name: value for name, value in fields.items() if name not in arrays}, shapes)]
    dist.broadcast_object_list(header)
    counts, shapes = header[0]
    arrived = dict(counts)
    for name, (shape, dtype) in shapes.items():
        arrived[name] = fields[name].contiguous() if fields is not None else torch.empty(shape, dtype=dtype)
        dist.broadcast(arrived[name], 0)
    return arrived


def gathered(tensor, world_size):
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor)
    return parts


def main(rank, world_size, interleave, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(7)  # every rank has the activations of all its tokens
    mine = ContextParallel(world_size, rank, BLOCK, interleave)
    shard = backend_of(BLOCK)
    cache, partial = shard.allocate_kv_cache(20), shard.impl("layer", scale=SCALE)
    whole = steps(world_size) if rank == 0 else None
    found = {"steps": 0, "tokens": 0, "max_abs_error": 0.0, "shard_tokens": 0}
    whole_cache = impl = None
    for _ in STEPS:
        backend, metadata = next(whole) if whole else (None, None)
        fields = metadata.asdict_zerocopy({"seq_start_loc", "paged_kv_indices"}) if metadata is not None else None
        arrived = metadata_from_fields(broadcast(fields))
        local = mine.metadata(arrived, shard)
        query = torch.randn(arrived.num_tokens, HEADS, SIZE)
        key, value = torch.randn(2, arrived.num_tokens, KV_HEADS, SIZE).unbind()
        output, lse = partial.forward_with_lse(query, key, value, cache, local)
        merged, _ = merge_attention(gathered(output, world_size), gathered(lse, world_size))
        found["shard_tokens"] += int((local.host.slot_mapping >= 0).sum())
        if rank == 0:
            if impl is None:
                impl, whole_cache = backend.impl("layer", scale=SCALE), backend.allocate_kv_cache(20)
            expected = impl.forward(query, key, value, whole_cache, metadata)
            found["max_abs_error"] = max(found["max_abs_error"], float((merged - expected).abs().nan_to_num(9).max()))
            found["steps"] += 1
            found["tokens"] += arrived.num_tokens
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
