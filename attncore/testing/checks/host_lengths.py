"""What a spec says of lengths on the host, over steps whose host lengths are upper bounds, or unknown there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attncore.builder.fields import DERIVED
from attncore.step_arrays import OF_LENGTHS
from attncore.testing.engines.builder_engine import BuilderEngine
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.requests import MAX_REQUESTS
from attncore.testing.engines.steps_on_device import copied, plan
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import in_one_layer
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["test_lengths_on_the_host_that_are_upper_bounds", "test_lengths_that_the_host_does_not_know"]
DRAFTS = 2


@covers("host lengths")
@pytest.mark.parametrize("with_features", [False, True], ids=["plain", "features"])
def test_lengths_on_the_host_that_are_upper_bounds(attncore_subject: Subject, with_features: bool) -> None:
    """Overlapped steps: the device knows how many drafts of the last step were rejected, and the host does not. With
    all features that are declared, too: a window begins by the length that the device knows."""
    form = attncore_subject.form
    attncore_subject.require_phase("prefill", "decode")
    if form.host_lengths == "exact":
        raise UnsupportedError("its spec says host_lengths='exact'")
    features = in_one_layer(form.features) if with_features else {}
    if with_features and not features:
        raise UnsupportedError("its spec declares none of these features")
    backend = attncore_subject.backend()
    rejected = torch.zeros(MAX_REQUESTS, dtype=torch.int32, device=backend.config.device)
    engine = BuilderEngine(backend, depth=2, num_rejected=rejected, **features)
    size = engine.block_size
    for name in range(4):
        engine.add(name, 3 * size + 16)
    engine.fill({name: max(0, size - 2 + 3 * name) for name in range(4)})  # blocks may hold one token
    for counts, tokens in (((0, 2, 1, 2), 1), ((2, 0, 2, 1), 1), ((1, 2, 2, 0), 1 + DRAFTS)):
        verdicts: dict[Any, int] = dict(enumerate(counts))
        engine.step(dict.fromkeys(verdicts, 1 + DRAFTS))
        for row, one in enumerate(engine.batch.req_ids):
            rejected[row] = verdicts[one]
            engine.history[one] = engine.history[one].first(engine.context(one) - verdicts[one])
        scheduled = dict.fromkeys(verdicts, tokens)
        built = engine.build(scheduled, overlapped=True)  # as if no token of the last step were rejected
        requests = [StepRequest(name, tokens, engine.context(name)) for name in built.req_ids]
        engine.run_step(built, requests, slots=built.slot_mapping.cpu().numpy())
        engine.batch.rollback_many(verdicts)


@covers("host lengths")
def test_lengths_that_the_host_does_not_know(attncore_subject: Subject) -> None:
    """Where no length is read on the host it may know none: ``max_seq_len`` is the most that a request may have, and
    arrays that follow from lengths are missing."""
    if attncore_subject.form.host_lengths != "none":
        raise UnsupportedError(f"its spec says host_lengths={attncore_subject.form.host_lengths!r}")
    engine = Engine(attncore_subject.backend())
    for name, (context, tokens) in enumerate(attncore_subject.around_a_block(engine.block_size)):
        engine.add(name, context + tokens)
        engine.fill({name: context})
        scheduled: dict[Any, int] = {name: tokens}
        step = copied(engine.backend, engine.builder.build(engine.scheduled(scheduled)))
        for count in ("max_seq_len", "max_prefill_seq_len", "max_decode_seq_len"):
            setattr(step, count, engine.batch.max_model_len)
        known = [field for field in OF_LENGTHS if hasattr(step, field)]  # and made: the device knows them
        for field in set(known) - DERIVED:
            delattr(step.host, field)
        plan(engine.backend, step)
        engine.run_step(step, [StepRequest(name, tokens, context)])
