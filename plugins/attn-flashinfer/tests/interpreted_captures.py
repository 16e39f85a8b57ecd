"""Run with TRITON_INTERPRET=1: captured sizes that the device plans, the stand-in in FlashInfer's place.

The stand-in's run gives NaN where the plan in its workspace is not that of the pages which it reads. Pages of 128
tokens: of smaller ones a chunk has several, and the plans of short requests are all the same.
"""

import itertools
import math
import sys
from functools import partial

import flashinfer_standin as standin
import pytest
import torch
from attn_flashinfer import backend as plugin
from attn_flashinfer import device_plan, wrappers
from flashinfer_standin_plan import PROCESSORS

from attncore.builder import InputBatch, MetadataBuilder
from attncore.graphs import is_capturing
from attncore.testing.engines import captured_engine
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.harness.errors import ConformanceError

device_plan.processors = lambda device: PROCESSORS
wrappers.is_capturing = lambda device: True  # a replay here runs the layer again; no run is to plan, only the graph
captured_engine.CAPTURED_SIZES = (1, 3, 6)
captured_engine.MetadataBuilder = partial(MetadataBuilder, transport="copy")


def run(steps, tokens, options, *, faulty=False, **features):
    recorder = standin.Recorder("0.7.2")
    engine = CapturedEngine(
        standin.backend(recorder, block_size=128, options=options), tokens, junk=math.nan, **features
    )
    assert engine.backend.plan_of_captured == "device", engine.backend.why_plan
    planned = len(recorder.of("fast_decode_plan"))
    if faulty:
        device_plan.DevicePlan.__call__, right = lambda self: None, device_plan.DevicePlan.__call__
    try:
        for _ in range(steps):
            engine.change()
            engine.replayed()
    finally:
        if faulty:
            device_plan.DevicePlan.__call__ = right
    assert len(recorder.of("fast_decode_plan")) == planned, "the host planned a captured step"


class StepsOfAGraph:
    """In place of a captured graph of some steps: what is recorded, and the layer, again at each replay."""

    def __init__(self, impl, cache, metadata, inputs):
        self.impl, self.cache, self.metadata, self.inputs = impl, cache, metadata, inputs
        self.outputs, self.between = [], lambda: None

    def replay(self):
        for step, tensors in enumerate(self.inputs):
            if step:
                self.between()
                self.metadata.record_next()
            else:
                self.metadata.record()
            self.metadata.forget_step()
            self.outputs.append(self.impl.forward(*tensors, self.cache, self.metadata).clone())


def outputs_of_steps(plan, inputs, *, plans_once=False):
    """Of decodes that come to a new page in turn: as steps ahead, or one by one where the host plans."""
    backend = standin.backend(standin.Recorder("0.7.2"), block_size=128, options={"plan": plan})
    impl = backend.impl("layer", scale=0.125)
    batch = InputBatch(max_num_reqs=4, max_model_len=4096, block_size=128)
    for row, length in enumerate((255, 1406, 126)):
        batch.add_request(row, range(1 + 32 * row, 33 + 32 * row), length)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8, transport="copy")
    cache = torch.zeros(97, 2, 128, 2, 64, dtype=torch.bfloat16)
    cache.normal_(generator=torch.Generator().manual_seed(0))
    metadata = builder.capture(4)
    if plan == "host":
        found = []
        for tensors in inputs:
            found.append(impl.forward(*tensors, cache, builder.build(bucket=4)).clone())
        return torch.stack(found)[:, :3]
    impl.forward(*inputs[0], cache.clone(), metadata)
    graph = StepsOfAGraph(impl, cache.clone(), metadata, inputs)
    graph.replay()  # the capture
    graph.cache, graph.outputs = cache, []
    if plans_once:
        graph.between = lambda: setattr(backend, "record_plan", lambda metadata: True)
    builder.run_ahead(len(inputs), bucket=4).replay(graph, len(inputs))
    return torch.stack(graph.outputs)[:, :3]


def steps_ahead_are_planned_each():
    plugin.is_capturing = lambda device: True
    generator = torch.Generator().manual_seed(1)
    inputs = [[torch.randn(4, heads, 64, generator=generator).bfloat16() for heads in (4, 2, 2)] for _ in range(4)]
    wanted = outputs_of_steps("host", inputs)
    assert torch.equal(outputs_of_steps("device", inputs), wanted)
    assert not torch.equal(outputs_of_steps("device", inputs, plans_once=True), wanted), "no new plan, and nothing said"


class LayerAgain:
    """In place of a captured graph: what is recorded, and the layer over ``tensors``, again at each replay."""

    def __init__(self, impl, cache, metadata):
        self.impl, self.cache, self.metadata, self.tensors, self.output = impl, cache, metadata, (), None

    def replay(self):
        self.metadata.record()
        self.metadata.forget_step()
        self.output = self.impl.forward(*self.tensors, self.cache, self.metadata).clone()


def outputs_of_drafts(plan, inputs, verdicts, *, waits):
    """Of three rows of three tokens each, some of which are rejected. ``waits``: a step is built when the verdicts of
    the last one have reached the host; else while it runs, by lengths that only the device knows exactly.
    """
    backend = standin.backend(standin.Recorder("0.7.2"), block_size=128, options={"plan": plan})
    impl = backend.impl("layer", scale=0.125)
    batch = InputBatch(max_num_reqs=4, max_model_len=4096, block_size=128)
    for row, length in enumerate((251, 1402, 120)):
        batch.add_request(row, range(1 + 32 * row, 33 + 32 * row), length)
    rejected = torch.zeros(4, dtype=torch.int32)
    builder = MetadataBuilder(
        batch, backend, max_num_batched_tokens=16, decode_threshold=3, num_rejected=rejected, transport="copy"
    )
    cache = torch.zeros(97, 2, 128, 2, 64, dtype=torch.bfloat16)
    cache.normal_(generator=torch.Generator().manual_seed(0))
    metadata = builder.capture(4, 3)
    graph = LayerAgain(impl, cache.clone(), metadata)
    if plan == "device":
        graph.tensors = inputs[0]
        impl.forward(*inputs[0], graph.cache, metadata)
        graph.replay()  # the capture
    graph.cache, found, late = cache, [], None
    for tensors, counts in zip(inputs, verdicts, strict=True):
        if waits and late is not None:
            batch.rollback_many(late)
        step = builder.build(query_len=3, bucket=4, overlapped=not waits and late is not None)
        if not waits and late is not None:
            assert builder.host_lengths(step) == "bounded"
            batch.rollback_many(late)
        graph.tensors = tensors
        if plan == "device":
            step.replay(graph)
            found.append(graph.output[:9])
        else:
            found.append(impl.forward(*tensors, cache, step).clone()[:9])
        rejected[:3] = torch.tensor(counts, dtype=torch.int32)
        late = dict(enumerate(counts))
    return torch.stack(found), builder


def overlapped_steps_are_planned_by_exact_lengths():
    plugin.is_capturing = lambda device: True
    generator = torch.Generator().manual_seed(2)
    inputs = [[torch.randn(12, heads, 64, generator=generator).bfloat16() for heads in (4, 2, 2)] for _ in range(8)]
    verdicts = torch.randint(0, 3, (8, 3), generator=generator).tolist()
    wanted, _ = outputs_of_drafts("host", inputs, verdicts, waits=True)
    found, builder = outputs_of_drafts("device", inputs, verdicts, waits=False)
    assert torch.equal(found, wanted)
    none = [[0, 0, 0] for _ in verdicts]
    assert not torch.equal(outputs_of_drafts("device", inputs, none, waits=False)[0], wanted), "verdicts are not read"
    builder.release(4)
    builder.capture(4, 3)  # and no graph
    before = builder.last_step
    for bucket in (4, None):  # both are the host's to plan, which has bounds alone
        with pytest.raises(ValueError, match="backend 'flashinfer' needs exact lengths for a plan on the host"):
            builder.build(query_len=3, bucket=bucket, overlapped=True)
        assert builder.last_step == before


steps_ahead_are_planned_each()
overlapped_steps_are_planned_by_exact_lengths()
plugin.is_capturing = is_capturing
kernels = {"tensor_cores": (1, 3), "cuda_cores": (1,)}
for kernel, window in itertools.product(kernels, (None, 9)):
    for tokens in kernels[kernel]:
        run(4, tokens, {"decode": kernel}, **({"sliding_window": window} if window else {}))
try:
    run(20, 1, {"plan": "device"}, faulty=True)
except ConformanceError:
    print("equal")
else:
    sys.exit("plans that no node renewed were not noticed")
