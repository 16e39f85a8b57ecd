"""A build that fails or is interrupted leaves the last step's fields on the device as they were."""

import itertools

import pytest
import torch
from builder.adopted.adopted_engine import MODEL_LEN, int32
from builder.plain_backend import Least, config
from interrupted_calls import AtOpcode, Interrupt

from attncore import AdoptedSteps, BackendSpec, MultipleOf
from attncore.builder.adopted.device_fields import MADE
from attncore.errors import AttncoreError, CaptureError

LARGEST = {"max_num_reqs": 4, "max_num_tokens": 16, "max_model_len": MODEL_LEN, "num_blocks": 200}
ASKED = ("query_lens", "positions", "paged_kv_indptr", "paged_kv_indices")


def tensors(lengths, queries):
    starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
    table = torch.arange(1 + lengths[0], 1 + lengths[0] + 15 * len(lengths), dtype=torch.int32)
    return {
        "query_start_loc": int32(*starts), "seq_lens": int32(*lengths), "block_table": table.view(-1, 15),
        "slot_mapping": torch.arange(max(starts[-1], len(lengths))),
    }  # fmt: skip


class Asking(Least):
    """Its plan asks for fields on the device, notes them, and fails where it is told to."""

    asked, fails = (), False

    def plan(self, metadata):
        self.metadata, self.saw = metadata, {name: getattr(metadata, name).tolist() for name in self.asked}
        if self.fails:
            raise ValueError("metadata: no plan")


def spec(*, page_list, pad=0):
    return BackendSpec(
        name="least", api=1, factory="nowhere:Least", devices={"any": 0}, dtypes={"float32"}, head_sizes={8},
        block_sizes=MultipleOf(1), device_needs={"paged_kv_indices"} if page_list else (), cuda_graph="always",
        pad_seq_len=pad,
    )  # fmt: skip


def fields_of(metadata):
    return {name: getattr(metadata, name).tolist() for name in sorted({*MADE, "seq_lens"})}


def expected(given):
    """Fields of a step alone."""
    return fields_of(AdoptedSteps(Least(config()), **LARGEST).build(**given))


FIRST, SECOND = tensors([5, 9], [1, 1]), tensors([7, 8], [1, 3])


@pytest.mark.parametrize("page_list", [False, True])
@pytest.mark.parametrize("before", [(), ("positions", "seq_start_loc"), sorted(MADE)])
def test_a_failed_plan_that_asks_for_fields_leaves_the_last_step_its_own(page_list, before):
    backend = Asking(config(spec(page_list=page_list)))
    steps = AdoptedSteps(backend, **LARGEST)
    last = steps.build(**FIRST)
    for name in before:
        getattr(last, name)
    backend.asked, backend.fails = ASKED, True
    for _ in range(2):
        with pytest.raises(ValueError, match="metadata: no plan"):
            steps.build(**SECOND)
    assert steps.last_step == 0
    assert fields_of(last) == expected(FIRST)
    backend.fails = False
    assert fields_of(steps.build(**SECOND)) == expected(SECOND)


@pytest.mark.parametrize("asked", [("query_lens", "positions"), ("paged_kv_indices", "query_lens"), ASKED[::-1]])
def test_a_plan_is_given_its_own_step_and_not_the_last_one(asked):
    """Where fields are made behind the plan, what lies there is the last step's until then."""
    backend = Asking(config())
    steps = AdoptedSteps(backend, **LARGEST)
    backend.asked = asked
    for given in (FIRST, SECOND, FIRST):
        metadata = steps.build(**given)
        wanted = expected(given)
        assert backend.saw == {name: wanted[name] for name in asked}
        assert fields_of(metadata) == wanted


def test_a_failed_plan_that_asks_for_nothing_writes_nothing(monkeypatch):
    """An engine may have written its next step into the tensors of the last one."""
    backend = Asking(config(spec(page_list=True)))
    steps, given = AdoptedSteps(backend, **LARGEST), {name: tensor.clone() for name, tensor in FIRST.items()}
    last = steps.build(**given)
    indices = last.paged_kv_indices.tolist()
    for name, tensor in given.items():
        tensor.copy_((FIRST | {"seq_lens": int32(50, 60)})[name])
    backend.fails = True
    with pytest.raises(ValueError, match="metadata: no plan"):
        steps.build(**given)
    assert last.paged_kv_indices.tolist() == indices


def test_metadata_of_a_failed_build_makes_nothing():
    """A plan may have kept it."""
    backend = Asking(config())
    steps = AdoptedSteps(backend, **LARGEST)
    backend.fails = True
    for last in (None, steps.last_step + 1):
        with pytest.raises(ValueError, match="metadata: no plan"):
            steps.build(**SECOND)
        kept = backend.metadata
        if last is not None:
            backend.fails = False
            wanted = fields_of(metadata := steps.build(**FIRST))
        with pytest.raises(AttncoreError, match="metadata: positions was asked for of a step whose build failed"):
            _ = kept.positions
        with pytest.raises(CaptureError, match="record: the build of this step failed"):
            kept.record()
    assert fields_of(metadata) == wanted == expected(FIRST)


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("asked", [(), ASKED])
def test_an_interrupted_build_leaves_the_last_step_its_own(pad, asked):
    """Before each opcode of a build; steps of a captured size whose backend lends padded rows keys, too."""
    backend = Asking(config(spec(page_list=True, pad=pad)))
    steps = AdoptedSteps(backend, **LARGEST)
    backend.asked = asked
    for size in (2, 3):  # each in memory of its own
        steps.capture(size)
    first, second = tensors([9, 0], [1, 0]), tensors([7, 3, 5], [1, 1, 1])
    opcode, kept = 0, 0
    while True:
        metadata = steps.build(**first)
        wanted, last = fields_of(metadata), steps.last_step
        assert wanted["seq_lens"] == [9, pad]
        with AtOpcode(opcode) as interrupt:
            steps.build(**second)
        if not interrupt.fired:
            break
        if steps.last_step == last:
            assert fields_of(metadata) == wanted, opcode
            kept += 1
        opcode += 1
    assert kept > 300


@pytest.mark.parametrize("kernels", ["cython", "numba"])
def test_last_step_tells_of_a_build_whose_taking_back_was_interrupted_and_ends_that(kernels, monkeypatch):
    backend = Asking(config(spec(page_list=True)))
    steps = AdoptedSteps(backend, kernels=kernels, **LARGEST)
    for count in itertools.count(step=3):
        last = steps.build(**FIRST)
        wanted, number, interrupts = fields_of(last), steps.last_step, []
        backend.asked, backend.fails = ASKED, True

        def restore(*args, real=steps._fields.restore, count=count, interrupts=interrupts, **options):
            interrupts.append(AtOpcode(count))
            interrupts[-1].__enter__()
            try:
                real(*args, **options)
            finally:
                interrupts[-1].__exit__(None, None, None)

        with monkeypatch.context() as patch:
            patch.setattr(steps._fields, "restore", restore)
            with pytest.raises((ValueError, Interrupt)):
                steps.build(**SECOND)
        backend.fails = False
        assert steps.last_step == number
        assert fields_of(last) == wanted
        if not interrupts[0].fired:
            break
    assert count > 50
