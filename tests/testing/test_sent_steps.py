"""The kit's engines whose steps a builder sends to a device: the table is then its own, no copy."""

import pytest
import torch

from attncore import BackendConfig
from attncore.builder import MetadataBuilder
from attncore.reference import ReferenceBackend, ReferenceImpl
from attncore.testing.engines import builder_engine, captured_engine
from attncore.testing.engines.builder_engine import BuilderEngine
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.harness.errors import ConformanceError

BLOCK = 4
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_A_GPU = [pytest.param("cuda:0", way, marks=[pytest.mark.gpu, NO_CUDA]) for way in ("copy", "graph")]
SENT = pytest.mark.parametrize(("device", "transport"), [("cpu", "copy"), *ON_A_GPU], indirect=["transport"])


@pytest.fixture
def transport(request, monkeypatch):
    """The transport of every builder that the engines make; a CPU has none unless it is asked for."""

    def builder(*arguments, **settings):
        return MetadataBuilder(*arguments, **{**settings, "transport": request.param})

    for engine in (builder_engine, captured_engine):
        monkeypatch.setattr(engine, "MetadataBuilder", builder)
    return request.param


def backend(device, write=None):
    """The reference, whose layer then calls ``write`` with the metadata."""

    class Impl(ReferenceImpl):
        def forward(self, query, key, value, kv_cache, metadata, output=None):
            found = super().forward(query, key, value, kv_cache, metadata, output)
            if write is not None:
                write(metadata)
            return found

    class Backend(ReferenceBackend):
        impl_class = Impl

    return Backend(BackendConfig(2, 2, 8, "float32", BLOCK, device=device))


def of_shorter_rows(engine):
    """Steps whose rows have fewer blocks than those that stood there before."""
    for name, length in enumerate((5, 4, 3, 2)):
        engine.add(name, length * BLOCK)
    engine.fill({name: (length - 1) * BLOCK for name, length in enumerate((5, 4, 3, 2))})
    for names in ((0, 1, 2, 3), (3, 2), (3,)):
        engine.step(dict.fromkeys(names, 1))


@SENT
@pytest.mark.parametrize("depth", [1, 2])
def test_ids_behind_a_requests_blocks_are_no_write_of_the_backend(device, transport, depth):
    engine = BuilderEngine(backend(device), depth=depth)
    of_shorter_rows(engine)
    assert engine.builder.transport == transport
    step = engine.builder.build(engine.scheduled({3: 1}))
    assert not step.host.block_table[0, 2:].any()
    assert step.block_table[0, 2:].any()  # else the steps above show nothing


@pytest.mark.parametrize("transport", ["copy"], indirect=True)
@pytest.mark.parametrize("tokens", [1, 3])
def test_captured_sizes_over_changing_batches_pass(
    transport, tokens
):  # on a GPU by plugins: CUDA captures no reference
    engine = CapturedEngine(backend("cpu"), tokens)
    for _ in range(40):
        engine.change()
        engine.replayed()
    assert engine.builder.transport == transport


@SENT
@pytest.mark.parametrize(
    "write",
    [
        lambda metadata: metadata.block_table[:, :1].add_(1),
        lambda metadata: metadata.block_table[:, -1:].fill_(1),
        lambda metadata: metadata.block_table.zero_(),
    ],
    ids=["within_its_blocks", "behind_them", "everywhere"],
)
def test_a_backend_that_writes_to_the_table_is_found(device, transport, write):
    with pytest.raises(ConformanceError, match=r"forward changed metadata\.block_table; "):
        of_shorter_rows(BuilderEngine(backend(device, write), depth=1))


def test_steps_of_the_list_builder_say_what_they_were_built_from():
    """As the contract has it: a backend may ask the groups which prompts have context."""
    seen = []
    engine = Engine(backend("cpu", lambda metadata: seen.append(metadata.source)))
    engine.add(0, 9)
    engine.add(1, 5)
    engine.fill({0: 3})
    engine.list_step({1: 4}, {0: 1})
    assert [group.is_prompt for group in seen[-1].groups] == [True, False]
    assert [sequence.context_len for group in seen[-1].groups for sequence in group.sequences] == [0, 3]
