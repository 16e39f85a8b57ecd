"""An engine whose drafts are judged a step late: the host has bounds, the device exact lengths."""

import numpy as np
import oracles
import torch

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder

FIELDS = ("slot_mapping", "positions", "seq_lens", "context_lens", "seq_start_loc", "paged_kv_indptr",
          "paged_kv_last_page_len")  # fmt: skip
GROUPS = [KVCacheGroup("a", 4), KVCacheGroup("b", 16), KVCacheGroup("c", 4)]


def drafts_judged_late(kernels, seed, steps=60, device="cpu", transport="copy", backend=None):
    """Runs an engine with up to three drafts a request, whose verdicts reach the host one step late."""
    rng = np.random.default_rng(seed)
    batch = InputBatch(max_num_reqs=5, max_model_len=160, groups=GROUPS, kernels=kernels)
    rejected = torch.zeros(5, dtype=torch.int32, device=device)
    builder = MetadataBuilder(
        batch, backend, max_num_batched_tokens=64, decode_threshold=4, transport=transport, num_rejected=rejected
    )
    exact, blocks, next_block, verdicts = {}, {}, 1, {}
    for step in range(steps):
        overlapped = step > 0 and rng.random() < 0.8
        if not overlapped:  # the engine waited for the last step: its verdicts are the host's as well
            batch.rollback_many({r: n for r, n in verdicts.items() if r in batch})
            verdicts = {}
        for req_id in [r for r in exact if exact[r] > 140 or rng.random() < 0.05]:
            batch.remove_request(req_id)
            del exact[req_id], blocks[req_id]
            verdicts.pop(req_id, None)
        while len(batch) < 5 and rng.random() < 0.6:
            computed = int(rng.integers(0, 60))
            blocks[step * 10 + len(batch)] = {}
            req_id = step * 10 + len(batch)
            for group in GROUPS:
                count = oracles.cdiv(160, group.block_size)
                blocks[req_id][group.name] = list(range(next_block, next_block + count))
                next_block += count
            batch.add_request(req_id, blocks[req_id], computed)
            exact[req_id] = computed
        queries = {r: int(rng.choice([0, 1, 1, 2, 3, 4])) for r in batch.req_ids}
        metadata = builder.build(queries, overlapped=overlapped)
        assert builder.host_lengths(metadata) == ("bounded" if overlapped else "exact")
        for group in GROUPS:
            rows = [(blocks[r][group.name], exact[r], queries[r]) for r in metadata.req_ids]
            expected = oracles.persistent_step(rows, group.block_size, 4)
            of_group = metadata.groups[group.name]
            for name in FIELDS:
                assert getattr(of_group, name).tolist() == expected[name], (step, name)
            assert (of_group.host.seq_lens >= np.array(expected["seq_lens"])).all()
        # The step runs; the sampler says on the device, by row, how many drafts were wrong.
        wrong = {r: int(rng.integers(0, queries[r])) for r in metadata.req_ids}
        rejected[: len(wrong)] = torch.tensor([wrong[r] for r in metadata.req_ids], dtype=torch.int32, device=device)
        # Only now does the host learn of the step before.
        batch.rollback_many({r: n for r, n in verdicts.items() if r in batch})
        verdicts = wrong
        for req_id in metadata.req_ids:
            exact[req_id] += queries[req_id] - wrong[req_id]
    return builder
