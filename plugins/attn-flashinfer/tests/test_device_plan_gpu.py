"""Captured decodes that the device plans, beside those that the host plans: the real FlashInfer on a CUDA device."""

from __future__ import annotations

import gc
import itertools
import random
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from attn_flashinfer import modules

import attncore
from attncore import AdoptedSteps, NoBackendError
from attncore.builder import InputBatch, MetadataBuilder
from attncore.graphs import capturing, new_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer-python is not installed"),
]
PAGE, LONGEST, SIZES, ROWS = 16, 2048, (2, 8, 16), 16
BLOCKS = ROWS * LONGEST // PAGE + 1
WINDOWS: dict[str, tuple[int | None, ...]] = {"plain": (None,), "two keys": (None, 300)}


class Road:
    """A builder over a backend of its own, which plans captured decodes on the device or on the host."""

    def __init__(
        self, plan: str, decode: str, tokens: int, windows: tuple[int | None, ...], transport: str, caches: list[Any],
        *, branch: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        try:
            choice = attncore.select(
                num_heads=8, num_kv_heads=2, head_size=64, dtype="bfloat16", block_size=PAGE, backend="flashinfer",
                options={"flashinfer": {"plan": plan, "decode": decode, "plan_branch": branch}},
            )  # fmt: skip
        except NoBackendError as error:
            if "have to be compiled" not in str(error):
                raise
            pytest.skip(f"a module is not built, and cannot be compiled here: {modules.no_compiler()}")
        self.backend: Any = choice.create()
        self.tokens, self.caches = tokens, caches
        self.impls = [self.backend.impl(f"{w}", scale=0.125, sliding_window=w) for w in windows]
        self.batch = InputBatch(max_num_reqs=ROWS, max_model_len=LONGEST, block_size=PAGE, num_blocks=BLOCKS)
        self.builder = MetadataBuilder(
            self.batch, self.backend, max_num_batched_tokens=512, decode_threshold=tokens, transport=transport,
            **options,
        )  # fmt: skip
        self.inputs = [torch.zeros(ROWS * tokens, n, 64, dtype=torch.bfloat16, device="cuda") for n in (8, 2, 2)]
        self.graphs = {size: self.captured(size) for size in reversed(SIZES)}
        self.count()

    def count(self) -> None:
        """Counts the host's plans of the sizes that were captured so far, from now on."""
        self.planned = 0
        for key in self.backend.plan_keys:
            for size in self.backend.plans_of(key)._captured.values():
                size._plan = self.counted(size._plan)

    def counted(self, plan: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> None:
            self.planned += 1
            plan(*args, **keywords)

        return call

    def layers(self, metadata: Any) -> list[torch.Tensor]:
        tensors = [tensor[: metadata.num_tokens] for tensor in self.inputs]
        pairs = zip(self.impls, self.caches, strict=True)
        return [impl.forward(*tensors, cache, metadata) for impl, cache in pairs]

    def captured(self, size: int) -> Any:
        metadata = self.builder.capture(size, self.tokens)
        self.layers(metadata)
        torch.cuda.synchronize()
        graph = new_graph("cuda")
        with capturing(graph):
            metadata.record()
            outputs = self.layers(metadata)
        return graph, outputs

    def step(self, names: list[str], size: int, inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        for held, new in zip(self.inputs, inputs, strict=True):
            held.copy_(new)
        idle = {name: 0 for name in self.batch.req_ids if name not in names}
        metadata = self.builder.build(idle, query_len=self.tokens, bucket=size, **options)
        graph, outputs = self.graphs[size]
        metadata.replay(graph)
        torch.cuda.synchronize()
        return [output[: len(names) * self.tokens].clone() for output in outputs]


@pytest.mark.parametrize(
    ("decode", "tokens", "layers", "transport", "branch"),
    [
        *itertools.product(("tensor_cores",), (1, 4), WINDOWS, ("graph", "copy"), (False,)),
        *itertools.product(("cuda_cores",), (1,), WINDOWS, ("graph", "copy"), (False,)),
        *itertools.product(("tensor_cores",), (1, 4), ("two keys",), ("graph",), (True,)),
    ],
)
def test_outputs_are_those_of_plans_of_the_host(
    decode: str, tokens: int, layers: str, transport: str, branch: bool
) -> None:
    """Random batches, lengths and sizes; the outputs are equal bit for bit, and the host plans no captured step."""
    windows = WINDOWS[layers]
    caches = [torch.randn(BLOCKS, 2, PAGE, 2, 64, device="cuda").bfloat16() for _ in windows]
    roads = [
        Road(plan, decode, tokens, windows, transport, [cache.clone() for cache in caches], branch=branch)
        for plan in ("device", "host")
    ]
    device, host = roads
    assert (device.backend.plan_of_captured, host.backend.plan_of_captured) == ("device", "host")
    draw, per = random.Random(tokens), LONGEST // PAGE
    generator = torch.Generator("cuda").manual_seed(0)
    free, steps = list(range(ROWS)), 0
    for number in range(150):
        for name in list(device.batch.req_ids):
            if draw.random() < 0.15:
                for road in roads:
                    road.batch.remove_request(name)
                free.append(int(name.split(".")[0]))
        while free and (draw.random() < 0.7 or len(free) == ROWS):
            row = free.pop(draw.randrange(len(free)))
            length = draw.choice((1, 20, draw.randint(1, 1400), 1400))
            ids = list(range(1 + row * per, 1 + (row + 1) * per))
            for road in roads:
                road.batch.add_request(f"{row}.{number}", ids, length)
        names = list(device.batch.req_ids)
        size = next(size for size in SIZES if size >= len(names))
        inputs = [torch.randn(t.shape, device="cuda", generator=generator).bfloat16() for t in device.inputs]
        found, wanted = (road.step(names, size, inputs) for road in roads)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other), f"step {number} of {len(names)} requests in a size of {size}"
        steps += 1
    assert device.planned == 0
    assert host.planned == steps * len(windows)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("transport", ["graph", "copy"])
@pytest.mark.parametrize("decode", ["tensor_cores", "cuda_cores"])
def test_steps_ahead_in_one_graph_are_planned_each(decode: str, transport: str, branch: bool) -> None:
    """A graph of four steps gives, bit for bit, what four steps do that the host plans."""
    windows, size, count = WINDOWS["two keys"], 8, 4
    caches = [torch.randn(BLOCKS, 2, PAGE, 2, 64, device="cuda").bfloat16() for _ in windows]
    device, host = (
        Road(plan, decode, 1, windows, transport, [cache.clone() for cache in caches], branch=branch)
        for plan in ("device", "host")
    )
    metadata = device.builder.capture(size)
    graph, outputs = new_graph("cuda"), []
    with capturing(graph):
        for step in range(count):
            metadata.record_next() if step else metadata.record()
            outputs.append(device.layers(metadata))
    device.graphs[size] = graph, outputs  # behind the capture: the graph that it replaces is destroyed
    device.planned = 0  # the capture's own
    names = [f"{row}.0" for row in range(6)]
    for row, length in enumerate((1780, 3, 127, 1200, 14, 893)):
        for road in (device, host):
            road.batch.add_request(names[row], list(range(1 + row * 128, 1 + (row + 1) * 128)), length)
    for _ in range(30):
        inputs = [torch.randn(tensor.shape, device="cuda").bfloat16() for tensor in device.inputs]
        for held, new in zip(device.inputs, inputs, strict=True):
            held.copy_(new)
        device.builder.run_ahead(count, bucket=size).replay(graph, count)
        wanted = [host.step(names, size, inputs) for _ in range(count)]
        for step in range(count):
            for found, other in zip(outputs[step], wanted[step], strict=True):
                assert torch.equal(found[: len(names)], other), f"step {step} of {count}"
    assert device.planned == 0


@pytest.mark.parametrize("transport", ["graph", "copy"])
def test_overlapped_steps_are_planned_by_exact_lengths(transport: str) -> None:
    """Drafts whose verdicts the host learns a step late give, bit for bit, what a host gives that waits for them."""
    windows, size, names = WINDOWS["two keys"], 8, [f"{row}.0" for row in range(6)]
    caches = [torch.randn(BLOCKS, 2, PAGE, 2, 64, device="cuda").bfloat16() for _ in windows]
    rejected = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
    late = Road("device", "tensor_cores", 4, windows, transport, [one.clone() for one in caches], num_rejected=rejected)
    host = Road("host", "tensor_cores", 4, windows, transport, [one.clone() for one in caches])
    for row, length in enumerate((1500, 3, 127, 1200, 14, 893)):
        for road in (late, host):
            road.batch.add_request(names[row], list(range(1 + row * 128, 1 + (row + 1) * 128)), length)
    draw, verdicts = random.Random(0), dict.fromkeys(names, 0)
    for number in range(60):
        inputs = [torch.randn(tensor.shape, device="cuda").bfloat16() for tensor in late.inputs]
        found = late.step(names, size, inputs, overlapped=number > 0)
        late.batch.rollback_many(verdicts)  # of the step before: only now
        host.batch.rollback_many(verdicts)
        wanted = host.step(names, size, inputs)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other), f"step {number}"
        verdicts = {name: draw.randrange(4) for name in names}
        rejected[: len(names)] = torch.tensor(list(verdicts.values()), dtype=torch.int32, device="cuda")
    assert late.planned == 0


def test_a_graph_without_the_plan_is_noticed() -> None:
    """The control: what is recorded is what renews the plan."""
    cache = torch.randn(BLOCKS, 2, PAGE, 2, 64, device="cuda").bfloat16()
    roads = [Road(plan, "tensor_cores", 1, (None,), "graph", [cache.clone()]) for plan in ("device", "host")]
    size, metadata = 8, roads[0].builder.capture(8)
    recorded, roads[0].backend.record_plan = roads[0].backend.record_plan, lambda metadata: True
    graph = new_graph("cuda")
    with capturing(graph):
        metadata.record()
        outputs = roads[0].layers(metadata)
    roads[0].graphs[size] = graph, outputs  # behind the capture: the graph that it replaces is destroyed
    roads[0].backend.record_plan = recorded
    names, differ = [f"{row}.0" for row in range(6)], 0
    for row, length in enumerate((1900, 3, 900, 1200, 17, 1600)):
        for road in roads:
            ids = list(range(1 + row * 128, 1 + (row + 1) * 128))
            road.batch.add_request(names[row], ids, length)
    for _ in range(10):
        inputs = [torch.randn(tensor.shape, device="cuda").bfloat16() for tensor in roads[0].inputs]
        found, wanted = (road.step(names, size, inputs) for road in roads)
        differ += not torch.equal(found[0], wanted[0])
    assert differ == 10


def test_a_padded_step_that_is_run_without_its_graph() -> None:
    """No plan is made when it is built; what runs it makes one."""
    cache = torch.randn(BLOCKS, 2, PAGE, 2, 64, device="cuda").bfloat16()
    road = Road("device", "tensor_cores", 1, (None,), "copy", [cache])
    for row, length in enumerate((1900, 3, 900)):
        road.batch.add_request(row, list(range(1 + row * 128, 1 + (row + 1) * 128)), length)
    for tensor in road.inputs:
        tensor.normal_()
    padded = road.layers(road.builder.build(bucket=8))[0][:3].clone()
    assert road.planned == 0
    road.batch.rollback_many(dict.fromkeys(range(3), 1))
    eager = road.layers(road.builder.build())[0]
    torch.testing.assert_close(padded, eager, atol=2e-2, rtol=2e-2)


def test_adopted_steps() -> None:
    """Captured over an engine's own tensors, replayed over lengths that change, beside plans of the host."""
    cache = torch.randn(BLOCKS, 2, PAGE, 2, 64, device="cuda").bfloat16()
    outputs: dict[str, list[torch.Tensor]] = {}
    for plan in ("device", "host"):
        road = Road(plan, "tensor_cores", 1, (None,), "copy", [cache.clone()])
        steps = AdoptedSteps(
            road.backend, max_num_reqs=8, max_num_tokens=8, max_model_len=LONGEST, num_blocks=BLOCKS, depth=2
        )
        given = {
            "query_start_loc": torch.arange(9, dtype=torch.int32, device="cuda"),
            "seq_lens": torch.ones(8, dtype=torch.int32, device="cuda"),
            "block_table": torch.arange(1, 1 + 8 * 128, dtype=torch.int32, device="cuda").view(8, 128),
            "slot_mapping": torch.full((8,), -1, device="cuda"),
        }
        on_host = {"host_query_start_loc": torch.arange(9, dtype=torch.int32)}
        lengths = on_host["host_seq_lens"] = torch.ones(8, dtype=torch.int32)
        metadata = steps.build(**given, **on_host, capturing=True)
        road.layers(metadata)
        torch.cuda.synchronize()
        graph = new_graph("cuda")
        gc.collect()
        with capturing(graph):
            metadata.record()
            (output,) = road.layers(metadata)
        road.count()
        generator = torch.Generator().manual_seed(1)
        for _ in range(40):
            lengths.copy_(torch.randint(1, LONGEST, (8,), generator=generator))
            given["seq_lens"].copy_(lengths)
            for index, tensor in enumerate(road.inputs):
                tensor.copy_(torch.randn(tensor.shape, generator=generator.manual_seed(int(lengths[0]) + index)))
            steps.build(**given, **on_host).replay(graph)
            outputs.setdefault(plan, []).append(output.clone())
        assert road.planned == (0 if plan == "device" else 40)
    for one, other in zip(*outputs.values(), strict=True):
        assert torch.equal(one, other)


def test_quotients_by_floats_are_exact() -> None:
    from interpreted_divisions import differ

    assert differ("cuda", 20_000) == 0
