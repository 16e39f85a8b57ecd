"""Adopted steps: random batches, eager and in captured sizes, whose metadata is made of an engine's own tensors."""

import itertools
import os

import pytest
import torch

import attncore
from attncore.dense import dense_attention
from attncore.testing.engines.adopting_builder import AdoptingBuilder
from attncore.testing.engines.captured_engine import CapturedEngine

ON_GPU = os.environ["ATTNCORE_ROCM_DEV_DEVICE"] == "cuda"


def test_random_batches_eager_and_captured():
    request = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float16", "block_size": 16}
    engine = CapturedEngine(attncore.select(**request, backend="rocm").create(), 1, make_builder=AdoptingBuilder)
    for _ in range(300 if ON_GPU else 3):
        engine.change()
        engine.replayed()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("tokens", [(1, 0, 1, 0, 0, 1), (0, 0, 1, 1), (0, 1), (1, 0)])
def test_rows_without_tokens_stand_anywhere(tokens, captured):
    """A token of a decode is its own row's, not that of the row of its number."""
    torch.manual_seed(0)
    request = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float16", "block_size": 16}
    backend = attncore.select(**request, backend="rocm").create()
    impl, device, rows = backend.impl("0", scale=0.25), backend.config.device, len(tokens)
    given = {
        "query_start_loc": torch.tensor([0, *itertools.accumulate(tokens)], dtype=torch.int32),
        "seq_lens": torch.tensor([9 + row for row in range(rows)], dtype=torch.int32),
        "block_table": torch.arange(1, rows + 1, dtype=torch.int32).view(rows, 1),
        "slot_mapping": torch.full((rows if captured else sum(tokens),), -1),
    }
    hosts = {f"host_{name}": given[name].clone() for name in ("query_start_loc", "seq_lens")}
    steps = attncore.AdoptedSteps(backend, max_num_reqs=rows, max_num_tokens=64, max_model_len=16, num_blocks=8)
    if captured:
        steps.capture(rows)
    metadata = steps.build(**{name: tensor.to(device) for name, tensor in given.items()}, **hosts)
    keys, values = torch.randn(2, 8, 16, 2, 16).half()
    query, count = torch.randn(metadata.num_tokens, 4, 16).half(), sum(tokens)
    found = impl.forward(query.to(device), None, None, (keys.to(device), values.to(device)), metadata, write=False)
    expected = [
        dense_attention(query[token : token + 1].float(), keys[row + 1, : 9 + row].float(),
                        values[row + 1, : 9 + row].float(), scale=0.25)
        for token, row in enumerate(row for row, length in enumerate(tokens) if length)
    ]  # fmt: skip
    torch.testing.assert_close(found[:count].float().cpu(), torch.cat(expected), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("paired", [False, True], ids=["eager whole", "eager pair"])
def test_a_cache_that_is_given_other_memory(paired):
    """The same tensor, whose memory an engine has exchanged: its views of before show the old one."""
    request = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float16", "block_size": 16}
    backend = attncore.select(**request, backend="rocm", kv_cache_layout="HND").create()
    impl, cache, device = backend.impl("0", scale=0.25), backend.allocate_kv_cache(4), backend.config.device
    given = tuple(part.clone() for part in backend.kv_cache_views(cache)) if paired else cache
    batch = attncore.InputBatch(max_num_reqs=2, max_model_len=16, block_size=16)
    builder = attncore.MetadataBuilder(batch, backend, max_num_batched_tokens=16)
    batch.add_request("a", [1])
    said = [torch.zeros(0, 2, 16)] * 2
    for step in range(3):
        if step == 2:
            for part in given if paired else (given,):
                before = part.data
                part.data = before.clone()
                before.fill_(7.0)
        query, key, value = (torch.randn(1, heads, 16).half() for heads in (4, 2, 2))
        found = impl.forward(*(part.to(device) for part in (query, key, value)), given, builder.build())
        said = [torch.cat((old, new.float())) for old, new in zip(said, (key, value), strict=True)]
        torch.testing.assert_close(
            found.float().cpu(), dense_attention(query.float(), *said, scale=0.25), atol=4e-3, rtol=4e-3
        )
