"""A rank of test_over_ranks.py: attends in drawn steps over its part of the keys, and compares with all of them."""

import sys

import torch
import torch.distributed as dist

from attncore import BackendConfig, InputBatch, MetadataBuilder, select
from attncore.builder import ContextParallel
from attncore.dense import dense_attention
from attncore.ranks import over_ranks
from attncore.reference import ReferenceBackend

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4
COUNTS = [(1, 17, 5), (1, 1, 1), (6, 1, 1), (1, 1, 13), (1, 1, 1), (1, 0, 2)]


class Planning(ReferenceBackend):
    """A backend that runs the step alone that it planned last."""

    planned = None

    def plan(self, metadata):
        self.planned = metadata


def backend_of(kind):
    if kind == "planning":
        return Planning(BackendConfig(HEADS, KV_HEADS, SIZE, "float32", BLOCK))
    wanted = {"features": {"lse", "encoder_decoder"}} if kind == "split" else {"features": {"lse"}}
    return select(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype="float32", block_size=BLOCK, backend="reference",
        **wanted,
    ).create()  # fmt: skip


def check(kind, interleave, seed, features):
    """Steps in which a layer writes, and a second one that reads the same cache."""
    torch.manual_seed(seed)  # the same on every rank
    world, rank = dist.get_world_size(), dist.get_rank()
    ranks, plain = ContextParallel(world, rank, BLOCK, interleave), backend_of(kind)
    backend = over_ranks(plain, ranks)
    first, second = (backend.impl(name, scale=0.3, **features) for name in "ab")
    batch = InputBatch(max_num_reqs=3, max_model_len=64, block_size=BLOCK * world)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64, context_parallel=ranks)
    for name in range(3):
        batch.add_request(name, [1 + 3 * block + name for block in range(-(-40 // (BLOCK * world)))])
    cache = backend.allocate_kv_cache(40).fill_(torch.nan)
    known = {name: (torch.empty(0, KV_HEADS, SIZE), torch.empty(0, KV_HEADS, SIZE)) for name in range(3)}
    for counts in COUNTS:
        metadata = builder.build(dict(enumerate(counts)))
        total = metadata.num_tokens
        query, key, value = (torch.randn(total + 2, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        output = torch.full((total + 2, HEADS, SIZE), torch.nan)
        found, lse = first.forward_with_lse(query, key, value, cache, metadata, output)
        assert found is output
        again = second.forward(query, None, None, cache, metadata, write=False)
        if kind == "planning":
            rows = plain.planned
            assert (rows.num_decodes, rows.num_prefills) == (total, 0)
        expected, expected_lse = torch.zeros(total, HEADS, SIZE), torch.zeros(total, HEADS)
        for row, name in enumerate(metadata.req_ids):
            tokens = slice(*metadata.host.query_start_loc[row : row + 2])
            known[name] = tuple(torch.cat(pair) for pair in zip(known[name], (key[tokens], value[tokens]), strict=True))
            expected[tokens], expected_lse[tokens] = dense_attention(
                query[tokens], *known[name], scale=0.3, return_lse=True, **features
            )
        for got, wanted in ((found, expected), (lse, expected_lse), (again, expected)):
            torch.testing.assert_close(got[:total], wanted, atol=2e-5, rtol=2e-5)
        gathered = [torch.empty_like(found) for _ in range(world)]
        dist.all_gather(gathered, found.contiguous())
        assert all(torch.equal(one[:total], found[:total]) for one in gathered)
    held = backend.kv_cache_views(cache)[0][:, :, 0, 0]
    assert int((~held.isnan()).sum()) == sum(int(ranks.seq_lens([sum(c[i] for c in COUNTS)])[0]) for i in range(3))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sinks = {"sinks": [0.5, -1.0, 2.0, 0.0], "logits_soft_cap": 5.0}
    for seed, kind in enumerate(("split", "planning")):
        for interleave in (1, 2, 4):
            check(kind, interleave, seed, sinks if interleave == 2 else {})
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
