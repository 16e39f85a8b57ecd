"""The dtype and the head size of a replay's layers: what the backend has, named or of the machine's GPU."""

from types import SimpleNamespace

import pytest

from attncore import Host
from attncore.builder import KVCacheGroup
from attncore.cli import main
from attncore.replay.layers import make_layers as layers
from attncore.replay.settings import Settings


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (({"float32", "bfloat16"},), "float32"),
        (({"float16", "bfloat16"},), "bfloat16"),
        (({"float16"},), "float16"),
        (({"float16"}, {"bfloat16"}), "bfloat16"),
    ],
)
def test_a_named_backend_s_dtype(monkeypatch, dtypes, expected):
    forms = tuple((str(index), SimpleNamespace(dtypes=some)) for index, some in enumerate(dtypes))
    records = [
        SimpleNamespace(name="other", spec=SimpleNamespace(by_variant=())),
        SimpleNamespace(name="gpu", spec=None),
        SimpleNamespace(name="gpu", spec=SimpleNamespace(by_variant=forms)),
    ]
    monkeypatch.setattr(layers, "registry", lambda: SimpleNamespace(records=records))
    assert layers.dtype_of("gpu") == expected
    assert layers.dtype_of(None) == layers.dtype_of("unknown") == "float32"


GPU = "dtypes={{'float16', 'bfloat16'}}, head_sizes={sizes}, devices={{'cuda:sm_90': 50}},"


@pytest.fixture
def gpu(site, monkeypatch):
    """Plants a backend of a GPU that is not there, with some head sizes."""

    def plant(sizes):
        source = f"""
import attncore

@attncore.hookimpl
def attncore_backend():
    return attncore.BackendSpec(
        name="gpu", api=1, factory="attn_gpu_heavy:Backend", {GPU.format(sizes=sizes)} block_sizes={{16}},
        preferred_block_size=16, features={{"sliding_window"}},
    )
"""
        site.plugin("gpu", source)
        assumed = Host.assume("cuda:sm_90")
        monkeypatch.setattr("attncore.registry.host.host.Host.probe", classmethod(lambda cls: assumed))

    return plant


@pytest.mark.parametrize(
    ("sizes", "asked", "expected"),
    [
        ({64, 128}, None, (128, "bfloat16")),
        ({64}, None, (64, "bfloat16")),
        ({64, 128}, 64, (64, "bfloat16")),
        ({64, 128}, 80, None),
        ({96}, None, None),
    ],
)
def test_a_gpu_s_backend_gets_sizes_that_it_has(gpu, sizes, asked, expected):
    gpu(sizes)
    assert layers.fitting_a_gpu(Settings(), 4, 2, asked) == expected


def test_without_a_gpu_or_a_backend_for_it_nothing_changes(gpu, monkeypatch):
    gpu({128})
    assert layers.fitting_a_gpu(Settings(world_size=2), 4, 2, None) is None
    assert layers.fitting_a_gpu(Settings(block_size=7), 4, 2, None) is None
    window = (KVCacheGroup("window", 16, sliding_window=64),)
    assert layers.fitting_a_gpu(Settings(groups=window), 4, 2, None) == (128, "bfloat16")
    monkeypatch.setenv("ATTNCORE_BACKEND", "reference")
    assert layers.fitting_a_gpu(Settings(), 4, 2, None) is None
    monkeypatch.delenv("ATTNCORE_BACKEND")
    assert layers.fitting_a_gpu(Settings(), 4, 2, None) == (128, "bfloat16")
    monkeypatch.setattr("attncore.registry.host.host.Host.probe", classmethod(lambda cls: Host.assume("cpu")))
    assert layers.fitting_a_gpu(Settings(), 4, 2, None) is None


def test_the_command_asks_for_them_and_its_report_says_so(gpu, monkeypatch, capsys):
    """The layers themselves are made on this machine, by the reference."""
    pytest.importorskip("torch", reason="torch is not installed")
    gpu({64, 128})
    seen = []

    def made(settings, content, num_layers, backend, dtype=None, *more):
        seen.append((content.head_size, backend, dtype))
        monkeypatch.setattr("attncore.registry.host.host.Host.probe", classmethod(lambda cls: Host.assume("cpu")))
        return make(settings, content, num_layers, "reference", dtype, *more)

    make = layers.make_layers
    monkeypatch.setattr(layers, "make_layers", made)
    assert main(["replay", "--requests", "1", "--num-blocks", "200", "--seed", "3"]) == 0
    assert seen == [(128, None, "bfloat16")]
    assert "with heads of 128 and bfloat16, which it has" in " ".join(capsys.readouterr().out.split())
