"""The tensors of a step out of SGLang's batch, scales of its layers, and the names that it finds: without SGLang."""

import importlib
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attncore.integrations.sglang import register  # noqa: E402
from attncore.integrations.sglang.step_tensors import StepTensors, host_rows  # noqa: E402

PAGE, ROWS, TOKENS = 4, 5, 18


class Mode(SimpleNamespace):
    def is_decode(self):
        return self.name == "decode"


class WindowPool:
    """Slots of the window pool: those of the full one, two pages further."""

    def translate_loc_from_full_to_swa(self, slots):
        return slots + 2 * PAGE


def pool():
    """Row r has its tokens in pages 10 * r, 10 * r + 1 and so on."""
    tokens = torch.arange(TOKENS, dtype=torch.int32)
    return torch.stack([10 * row * PAGE + tokens for row in range(ROWS)])


def batch(mode, rows, lengths, extends=None, host=True):
    lengths = torch.tensor(lengths, dtype=torch.int64)
    return SimpleNamespace(
        batch_size=len(rows),
        forward_mode=Mode(name=mode),
        req_pool_indices=torch.tensor(rows),
        seq_lens=lengths,
        seq_lens_cpu=lengths if host else None,
        extend_seq_lens=None if extends is None else torch.tensor(extends, dtype=torch.int32),
        extend_seq_lens_cpu=extends,
        out_cache_loc=torch.arange(sum(extends or [1] * len(rows)), dtype=torch.int64),
    )


def made(given, window_pool=None):
    tensors = StepTensors(pool(), PAGE)
    host = host_rows(given)
    return host, [one.tolist() for one in tensors.rows(given, tensors.fill(given, host), window_pool)]


def test_decodes():
    host, (starts, lengths, table) = made(batch("decode", [3, 1], [9, 2]))
    assert host.starts.tolist() == starts == [0, 1, 2]
    assert host.lengths.tolist() == lengths == [9, 2]
    assert table == [[30, 31, 32], [10, 11, 12]]


def test_prefills():
    host, (starts, lengths, table) = made(batch("extend", [1, 4], [8, 5], [3, 5]))
    assert host.starts.tolist() == starts == [0, 3, 8]
    assert lengths == [8, 5]
    assert table == [[10, 11], [40, 41]]
    assert host.starts.dtype == host.lengths.dtype == np.int32


def test_lengths_on_the_device_alone_take_every_column():
    host, (_, lengths, table) = made(batch("decode", [2], [5], host=False))
    assert host.lengths is None
    assert lengths == [5]
    assert table == [[20, 21, 22, 23, 24]]


def test_the_window_pool_has_pages_of_its_own():
    _, (_, _, table) = made(batch("decode", [1, 2], [5, 1]), WindowPool())
    assert table == [[12, 13], [22, 23]]


def test_a_captured_size_finds_its_tensors_where_they_were():
    tensors = StepTensors(pool(), PAGE)

    def step(rows, lengths):
        given = batch("decode", rows, lengths)
        tensors.fill(given, host_rows(given))
        parts = (*tensors.rows(given, tensors.columns, None), tensors.slots(given, None, graph=True))
        return [one.data_ptr() for one in parts], parts

    first, _ = step([1, 2], [3, 4])
    second, (_, lengths, table, slots) = step([4, 3], [6, 1])
    assert first == second
    assert lengths.tolist() == [6, 1]
    assert table[:, 0].tolist() == [40, 30]
    assert slots.tolist() == [0, 1]
    assert tensors.slots(batch("decode", [1], [1]), WindowPool(), graph=True).data_ptr() != first[3]


@pytest.fixture
def engine(monkeypatch):
    """A stand-in of what ``register`` uses of SGLang."""
    registry = ModuleType("sglang.srt.layers.attention.attention_registry")
    registry.ATTENTION_BACKENDS = {}
    registry.register_attention_backend = lambda name: lambda made: registry.ATTENTION_BACKENDS.update({name: made})
    choices = ModuleType("sglang.srt.arg_groups.choices")
    choices.attention, choices.draft = [], []
    choices.add_attention_backend_choices = choices.attention.extend
    choices.add_draft_attention_backend_choices = choices.draft.extend
    groups = ModuleType("sglang.srt.arg_groups")
    groups.choices = choices
    sglang = ModuleType("sglang")
    sglang.__version__ = "0.5.23"
    for name in ("sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (sglang, groups, choices, registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(module=sglang, made=registry.ATTENTION_BACKENDS, choices=choices)


def test_each_name_is_registered_once(engine):
    register.register()
    register.register()
    names = list(engine.made)
    assert names[0] == "attncore"
    installed = {one.name for one in entry_points(group="attncore.backends")}  # none where attncore is only on the path
    assert {f"attncore_{name}" for name in installed & {"reference"}} <= set(names)
    assert "attncore_flash" in names  # installed or not: what is missing is said where it is named
    assert engine.choices.attention == engine.choices.draft == names


def test_backends_that_cannot_be_listed_leave_attncores_choice(engine, monkeypatch, caplog):
    def fails():
        raise RuntimeError("no list")

    monkeypatch.setattr("attncore.registry.plugins.discover.find", fails)
    register.register()
    assert list(engine.made) == ["attncore"]
    assert "no list" in caplog.text


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0", "unknown"])
def test_another_version_is_refused_when_a_backend_is_made(engine, version):
    register.register()
    engine.module.__version__ = version
    with pytest.raises(RuntimeError, match=f"SGLang {version} found; attncore's bridge is for SGLang 0.5.23"):
        engine.made["attncore"](None)


@pytest.fixture
def engine_facts(monkeypatch):
    """The module, over stand-ins of the classes that it takes from SGLang."""
    kinds = SimpleNamespace(DECODER=object())
    for name, given in {
        "layers.radix_attention": {"AttentionType": kinds, "RadixAttention": SimpleNamespace},
        "mem_cache.memory_pool": {"MHATokenToKVPool": SimpleNamespace},
        "mem_cache.swa_memory_pool": {"SWAKVPool": ModuleType},
        "model_executor.cuda_graph_config": {"Backend": None},
        "runtime_context": {"get_parallel": None},
    }.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(given)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "attncore.integrations.sglang.engine_facts"
    monkeypatch.delitem(sys.modules, name, raising=False)
    package = importlib.import_module("attncore.integrations.sglang")
    monkeypatch.setattr(package, "engine_facts", None, raising=False)  # no other test finds this one's there
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.mark.parametrize(("dtype", "scales"), [(torch.bfloat16, (1.0, 1.0)), (torch.float8_e4m3fn, (0.02, 0.5))])
def test_scales_of_a_checkpoint_are_those_of_an_fp8_cache(engine_facts, dtype, scales):
    """SGLang loads them for any cache, and divides by them where it converts to another dtype."""
    module = SimpleNamespace(
        tp_q_head_num=4, tp_k_head_num=2, qk_head_dim=16, v_head_dim=16, scaling=0.25, sliding_window_size=-1,
        logit_cap=0.0, layer_id=0, is_cross_attention=False, attn_type=engine_facts.AttentionType.DECODER,
        pos_encoding_mode="NONE", xai_temperature_len=-1, k_scale_float=0.02, v_scale_float=0.5,
    )  # fmt: skip
    layer = engine_facts.layer_of("layers.0", module, SimpleNamespace(dtype=dtype))
    assert (layer.k_scale, layer.v_scale) == scales
    module.k_scale_float = module.v_scale_float = None
    layer = engine_facts.layer_of("layers.0", module, SimpleNamespace(dtype=dtype))
    assert (layer.k_scale, layer.v_scale) == (1.0, 1.0)
