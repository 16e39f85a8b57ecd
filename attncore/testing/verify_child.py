"""The other process of ``verify``: ``python -m attncore.testing.verify_child QUESTION ANSWER``.

Writes a JSON object a line to ANSWER, each before what it announces is tried, so that the last line tells where it
stopped.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncore.abstract import AttentionBackend, BackendConfig
from attncore.process_end import run_as_child
from attncore.quoted import describe_error
from attncore.registry.child_process import tell
from attncore.registry.choice.select import select
from attncore.show import counted
from attncore.temporary_folder import NO_ROOM

if TYPE_CHECKING:
    from torch import Tensor

    from attncore.testing.engines.engine import Engine


MOST_WINDOW = 1024
"""Contexts go beyond a window of up to so many tokens: dense attention takes memory by the square of their length."""


MOST_TOKENS = 3
"""Of a request in the steps around a window."""


def main(question: str, answer: str) -> None:
    """Answer ``question``, a request in JSON with the backend's name."""
    asked, file = json.loads(Path(question).read_text(encoding="utf-8")), Path(answer)
    try:
        tell(file, phase="while it was created")
        backend = _created(asked)
        tell(file, phase="while it ran")
        tell(file, **compared(backend, asked))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the backend, which may raise anything
        tell(file, state="fails", message=describe_error(error), lacks=_lacks(error))


def _lacks(error: BaseException) -> bool:
    """Whether the machine had too little of something, which it may have the next time."""
    if isinstance(error, OSError):
        return error.errno in (*NO_ROOM, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
    return type(error).__name__ in ("MemoryError", "OutOfMemoryError")  # torch's is of a GPU


def _created(asked: dict[str, Any]) -> AttentionBackend:
    """The backend; ConformanceError where it keeps another configuration than it was created for."""
    choice = select(**asked)
    backend = choice.create()

    from attncore.testing.engines.left_alone import check_config

    check_config(backend, choice.config())
    return backend


def compared(backend: AttentionBackend, asked: dict[str, Any]) -> dict[str, Any]:
    """Run the same steps through ``backend`` and ``reference``: prompts, chunks, decodes, all mixed.

    ``reference`` itself is compared with dense attention, as every step of either is anyway.
    """
    import torch

    from attncore.testing.engines.compare import close, differs
    from attncore.testing.engines.engine import NUM_BLOCKS, Engine
    from attncore.testing.harness.errors import ConformanceError

    torch.set_num_threads(1)  # the steps are small; threads that wait for each other cost more than they compute
    names = ("sliding_window", "logits_soft_cap")
    features = {name: asked[name] for name in names if asked.get(name) is not None}
    window, size, spec = features.get("sliding_window") or 0, backend.config.block_size, backend.config.spec
    declared = None if spec is None else spec.max_model_len
    most_blocks = math.inf if spec is None or spec.max_block_id is None else spec.max_block_id + 1
    needed = 1 + sum(-(-(context + MOST_TOKENS) // size) for context in _around(window, size))  # and the null block
    fits = window <= MOST_WINDOW and needed <= most_blocks and (declared is None or window < declared)
    reached = window if fits else 0
    num_blocks = int(min(max(NUM_BLOCKS, needed if reached else 0), most_blocks))
    tested = Engine(backend, num_blocks=num_blocks, **features)
    against, other = "dense float32 attention", None
    if backend.name != "reference":
        other = Engine(_reference(backend.config), num_blocks=num_blocks, **features)
        other.phases = tested.phases  # so that contexts are computed by the same steps: numbers are drawn in each
        against = f"reference and {against}"
    if window > reached:
        against += f", in contexts that the window of {counted(window, 'token')} does not cut"
    steps, worst, message = 0, 0.0, ""
    for batch in _batches(tested, reached):
        steps += 1
        try:
            found = _run(tested, batch)
            if other is not None:
                wanted = _run(other, batch)
                worst = max(worst, differs(found, wanted))
                if not close(found, wanted, tested.tolerance):
                    message = f"its output differs from reference by {worst:.3g}"
        except ConformanceError as error:
            message = str(error)
            # An error that is not one of numbers has no size: none is shown rather than that of earlier steps.
            worst = max(worst, float("inf") if error.max_error is None else error.max_error)
        if message:
            break
    if not steps:
        raise ValueError(f"max_model_len: {declared} of its spec leaves no step to run")
    worst = max(worst, tested.max_error)
    return {
        "state": "differs" if message else "agrees",
        "message": message,
        "against": against,
        "steps": steps,
        "max_abs_error": worst if worst < float("inf") else None,
        "tolerance": tested.tolerance,
    }


def _around(window: int, size: int) -> list[int]:
    """Contexts whose keys a window begins to cut; none without one."""
    return [max(window - 1, 1), window, window + 1, window + size] if window else []


def _batches(engine: Engine, window: int) -> Iterator[list[tuple[int, int]]]:
    """Steps of requests of (context, tokens), their lengths around a block's edge, and around the ``window``; of those
    that are no longer than the spec allows.
    """
    longest = math.inf if engine.declared_length is None else engine.declared_length
    for batch in _all_batches(engine, window):
        if fitting := [(context, tokens) for context, tokens in batch if context + tokens <= longest]:
            yield fitting


def _all_batches(engine: Engine, window: int) -> Iterator[list[tuple[int, int]]]:
    size = engine.block_size
    contexts = sorted({1, max(1, size - 1), size, size + 1, 3 * size})
    if "prefill" in engine.phases:
        yield [(0, size + 1), (0, 1)] if "decode" in engine.phases else [(0, size + 1)]
        yield [(context, 3) for context in contexts]
    if "decode" in engine.phases:
        yield [(context, 1) for context in contexts]
    if len(engine.phases) > 1:
        yield [(context, 1 + context % 2 * size) for context in contexts]
    for tokens in [
        count for phase, count in (("decode", 1), ("prefill", MOST_TOKENS)) if phase in engine.phases and window
    ]:
        yield [(context, tokens) for context in _around(window, size)]


def _run(engine: Engine, batch: list[tuple[int, int]]) -> Tensor:
    from attncore.testing.engines.run_batches import run_batch

    for name in list(engine.batch.req_ids):
        engine.remove(name)
    return run_batch(engine, batch)


def _reference(config: BackendConfig) -> AttentionBackend:
    """The reference for the same heads and the same numbers: those exact in the dtypes of the model and of the cache,
    computed in float32.
    """
    from attncore.reference import ReferenceBackend

    return ReferenceBackend(
        BackendConfig(
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            config.dtype,
            config.block_size,
            kv_cache_dtype=config.kv_cache_dtype,
            device="cpu",
            head_size_v=config.head_size_v,
            use_mla=config.use_mla,
        )
    )


if __name__ == "__main__":
    run_as_child(main)
