"""A group of one rank: prefills, chunks and captured decodes are those of the backend alone. By gloo; on a GPU by NCCL,
where its all-gather and the kernel that merges are in the graph.
"""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from attncore import Host, InputBatch, MetadataBuilder, NoBackendError, select  # noqa: E402
from attncore.builder import ContextParallel  # noqa: E402
from attncore.graphs import capturing, new_graph  # noqa: E402
from attncore.merge import merge_attention  # noqa: E402
from attncore.ranks import over_ranks  # noqa: E402

HEADS, KV_HEADS, SIZE, SCALE = 8, 2, 128, 0.08
STEPS = ({"a": 40, "b": 7, "c": 1}, {"a": 1, "b": 33, "c": 1}, {}, {}, {})

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Side:
    """Steps of three requests by one backend, over all ranks or not."""

    def __init__(self, choice, device, ranks):
        plain = choice.create(device)
        self.backend, self.device = plain if ranks is None else over_ranks(plain, ranks), device
        self.impl = self.backend.impl("layer", scale=SCALE)
        self.cache = self.backend.allocate_kv_cache(12)
        batch = InputBatch(max_num_reqs=4, max_model_len=choice.block_size * 8, block_size=choice.block_size)
        self.builder = MetadataBuilder(batch, self.backend, max_num_batched_tokens=64, context_parallel=ranks)
        for row, name in enumerate("abc"):
            batch.add_request(name, [1 + row, 4 + row, 7 + row, 10 + row][: 3 if row else 4])
        self.graph, kind = None, {"dtype": getattr(torch, choice.request.dtype), "device": device}
        self.given = [torch.zeros(4, heads, SIZE, **kind) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        if choice.spec.cuda_graph != "never" and device.startswith("cuda"):
            metadata = self.builder.capture(4)
            self.impl.forward(*self.given, self.cache, metadata)
            self.graph = new_graph(device)
            with capturing(self.graph):
                metadata.record()
                self.output = self.impl.forward(*self.given, self.cache, metadata)

    def step(self, scheduled, tensors):
        captured = self.graph is not None and not scheduled
        metadata = self.builder.build(scheduled, bucket=4 if captured else None)
        if not captured:
            return self.impl.forward(*tensors, self.cache, metadata)
        for given, tensor in zip(self.given, tensors, strict=True):
            given[: len(tensor)] = tensor
        metadata.replay(self.graph)
        return self.output[: len(tensors[0])].clone()


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("reference", "cpu"),
        *(pytest.param(name, "cuda:0", marks=on_gpu) for name in ("reference", "flash", "flashinfer", "rocm")),
    ],
)
def test_one_rank_gives_what_its_backend_gives(name, device):
    cpu, dtype = device == "cpu", "float32" if device == "cpu" else "bfloat16"
    try:
        choice = select(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=dtype, backend=name, features={"lse"},
            host=Host.assume("cpu") if cpu else None,
        )  # fmt: skip
    except NoBackendError as error:
        pytest.skip(str(error).splitlines()[0])
    dist.init_process_group("gloo" if cpu else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sides = Side(choice, device, None), Side(choice, device, ContextParallel(1, 0, choice.block_size))
        torch.manual_seed(0)
        for scheduled in STEPS:
            count = sum(scheduled.values()) or 3
            kind = {"dtype": getattr(torch, dtype), "device": device}
            tensors = [torch.randn(count, heads, SIZE, **kind) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            expected, found = (side.step(scheduled, tensors) for side in sides)
            torch.testing.assert_close(found, expected, atol=1e-5 if cpu else 2e-2, rtol=1e-5 if cpu else 2e-2)
        for side in sides:
            if side.graph is not None:
                side.graph = None
                side.builder.release(4)
            side.builder.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_merges_what_torch_does_on_a_gpu(dtype):
    from attncore.ranks.merge_kernel import merge

    torch.manual_seed(0)
    for ranks, tokens, heads, size in ((2, 64, 32, 128), (4, 3, 5, 80), (8, 1, 1, 64)):
        outputs = torch.randn(ranks, tokens, heads, size, device="cuda").to(dtype)
        lses = 30 * torch.randn(ranks, tokens, heads, device="cuda")
        lses[0, 0], outputs[0, 0], lses[:, -1, -1] = -torch.inf, torch.nan, -torch.inf
        found = torch.empty(tokens, heads, size, dtype=dtype, device="cuda")
        lse = merge(outputs, lses, found)
        expected, expected_lse = merge_attention(outputs.unbind(), lses.unbind())
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 2e-2)
        torch.testing.assert_close(lse, expected_lse)
