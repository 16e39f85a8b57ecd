"""Run with TRITON_INTERPRET=1: captured sizes that the device plans, the stand-in in FlashInfer's place.

The stand-in's run gives NaN where the plan in its workspace is not that of the pages which it reads. Pages of 128
tokens: of smaller ones a chunk has several, and the plans of short requests are all the same.
"""

import itertools
import math
import sys
from functools import partial

import flashinfer_standin as standin
from attn_flashinfer import device_plan, wrappers
from flashinfer_standin_plan import PROCESSORS

from attncore.builder import MetadataBuilder
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
