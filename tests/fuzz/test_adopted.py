"""AdoptedSteps.build: right tensors and arrays give the persistent builder's step; others are refused by their name."""

import numpy as np
import torch
from builder.adopted.adopted_engine import BLOCK, BLOCKS, FIELDS, reference, same_arrays, same_counts, tensors_of
from fuzz.budget import examples
from fuzz.hostile import integers, objects, sequences
from fuzz.outcomes import outcome, plain
from fuzz.test_arrays import STRIDES
from hypothesis import given
from hypothesis import strategies as st

from attncore import AdoptedSteps, InputBatch, MetadataBuilder

ROWS, TOKENS, MODEL_LEN = 4, 48, 24
LIMITS = {"max_num_reqs": ROWS, "max_num_tokens": TOKENS, "max_model_len": MODEL_LEN, "num_blocks": BLOCKS}
BACKEND = reference()
rows = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=ROWS)
"""(context, tokens) of each request."""
names = st.sampled_from(
    ["query_start_loc", "seq_lens", "block_table", "slot_mapping", "host_query_start_loc", "host_seq_lens"]
)
kernels = st.sampled_from(["cython", "numba"])


def built(requests, kernels, threshold):
    """The step of a batch of these requests."""
    batch = InputBatch(max_num_reqs=ROWS, max_model_len=MODEL_LEN, block_size=BLOCK, num_blocks=BLOCKS, kernels=kernels)
    builder = MetadataBuilder(batch, BACKEND, max_num_batched_tokens=TOKENS, decode_threshold=threshold)
    for name, (context, tokens) in enumerate(requests):
        count = -(-(context + tokens) // BLOCK)
        batch.add_request(name, list(range(1 + 6 * name, 1 + 6 * name + count)), context)
    return builder.build({name: tokens for name, (_, tokens) in enumerate(requests)})


def host_of(metadata, strides):
    """The engine's host arrays, in memory of some strides that compiled code may read, or as tensors."""
    found = {name: np.array(getattr(metadata.host, name)) for name in ("query_start_loc", "seq_lens")}
    return {f"host_{name}": strides(array) for name, array in found.items()}


HOSTS = [*STRIDES[:4], torch.from_numpy]
"""The last of STRIDES is not aligned, which is refused."""


@examples(120)
@given(steps=st.lists(rows, min_size=1, max_size=3), kernels=kernels, threshold=st.integers(1, 3),
       strides=st.sampled_from(HOSTS))  # fmt: skip
def test_right_ones(steps, kernels, threshold, strides):
    adopting = AdoptedSteps(BACKEND, **LIMITS, decode_threshold=threshold, kernels=kernels)
    for requests in steps:
        metadata = built(requests, kernels, threshold)
        adopted = adopting.build(**tensors_of(metadata), **host_of(metadata, strides))
        same_counts(metadata, adopted)
        same_arrays(metadata, adopted)


def tensors():
    numbers = st.integers(-2, 9) | st.sampled_from([2**31 - 1, -(2**31), MODEL_LEN, MODEL_LEN + 1, TOKENS, TOKENS + 1])
    kinds = st.sampled_from([torch.int32, torch.int32, torch.int64, torch.float32, torch.bool, torch.uint8])
    flat = st.tuples(st.lists(numbers, max_size=6), kinds).map(lambda drawn: torch.tensor(drawn[0]).to(drawn[1]))
    shapes = st.lists(st.integers(0, 4), max_size=3)
    odd = st.tuples(shapes, kinds).map(lambda drawn: torch.zeros(drawn[0], dtype=drawn[1]))
    made = st.sampled_from(
        [
            lambda: torch.zeros(5, dtype=torch.int32).to_sparse(), lambda: torch.zeros(5, dtype=torch.int32)[::2],
            lambda: torch.empty(5, dtype=torch.int32, device="meta"), lambda: torch.zeros((3, 3)).int().T,
            lambda: torch.nn.Parameter(torch.zeros(3)), lambda: torch.zeros(3, dtype=torch.int32).expand(2, 3),
        ]
    )  # fmt: skip
    return flat | odd | made.map(lambda make: make())


@examples(200)
@given(
    requests=rows, name=names, threshold=st.integers(1, 3), flags=st.none() | integers,
    wrong=tensors() | sequences.map(lambda one: one()) | objects.map(lambda one: one()),
)  # fmt: skip
def test_one_that_is_wrong(requests, name, threshold, flags, wrong):
    """Both implementations alike; nothing has changed by a refusal, and the next step is right."""
    found = []
    for kernels in ("cython", "numba"):
        metadata = built(requests, kernels, threshold)
        adopting = AdoptedSteps(BACKEND, **LIMITS, decode_threshold=threshold, kernels=kernels)
        right = {**tensors_of(metadata), **host_of(metadata, np.array)}
        more = {} if flags is None else {"bounded": flags()}
        said = outcome(adopting.build, **{**right, name: wrong}, **more)
        if said[0] != "answer":
            assert adopting.last_step == -1
        else:
            said = [plain(getattr(said[1].host, field, None)) for field in FIELDS]
        found.append(repr(plain(said)))
        adopted = adopting.build(**right)
        same_counts(metadata, adopted)
        same_arrays(metadata, adopted)
    assert found[0] == found[1]
