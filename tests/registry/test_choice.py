"""A choice: what create imports, with what configuration, and how it fails."""

import logging
import sys

import numpy as np
import pytest
import torch

import attncore

FIELDS = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}


def test_create_imports_the_factory_and_select_does_not(site):
    site.plugin("plain")
    choice = attncore.select(backend="plain", **FIELDS)
    assert "attn_plain_heavy" not in sys.modules
    backend = choice.create()
    assert "attn_plain_heavy" in sys.modules
    assert (backend.name, backend.spec.name) == ("plain", "plain")
    assert backend.config.device == "cpu"
    assert (backend.config.block_size, backend.config.num_heads) == (choice.block_size, 4)


OPTIONS = "options={'pages': __import__('attncore').Option(int, 'how many', default=2)}, requires=(),"


def test_options_reach_the_backend_with_defaults(site):
    site.plugin("acme", extra=OPTIONS)
    assert attncore.select(backend="acme", **FIELDS).create().config.options == {"pages": 2}
    choice = attncore.select(backend="acme", options={"acme": {"pages": 3}}, **FIELDS)
    assert choice.create().config.options == {"pages": 3}
    assert choice.create(options={"pages": 4}).config.options == {"pages": 4}


def test_options_that_the_spec_does_not_declare(site):
    site.plugin("acme", extra=OPTIONS)
    choice = attncore.select(backend="acme", **FIELDS)
    with pytest.raises(ValueError, match="options: 'colour' is not declared by acme; declared: pages"):
        choice.create(options={"colour": 1})
    with pytest.raises(ValueError, match="options: 'pages': 'x' is not an int"):
        choice.create(options={"pages": "x"})


@pytest.mark.parametrize(
    ("field", "error", "text"),
    [
        ({"options": 3}, TypeError, "options: 3 cannot be read as a mapping"),
        ({"options": np.zeros(2)}, TypeError, "options: array.* cannot be read as a mapping"),
        ({"device": np.zeros(2)}, ValueError, "device: array.* is not a device as torch writes it"),
        ({"device": ""}, ValueError, "device: '' is not a device as torch writes it"),
        ({"device": "npu"}, ValueError, "device: 'npu' cannot be used here: "),
        ({"device": "mkldnn:0"}, ValueError, "device: 'mkldnn:0' cannot be used here: torch has no such device; give"),
        ({"device": "cuda:99"}, ValueError, "device: 'cuda:99' cannot be used here: "),
        ({"device": "cudo"}, ValueError, "device: 'cudo' cannot be used here: torch has no such device.*mean cuda"),
    ],
)
def test_odd_arguments_of_create_name_themselves(field, error, text):
    with pytest.raises(error, match=f"^{text}"):
        attncore.select(backend="reference", **FIELDS).create(**field)


def without_a_gpu(monkeypatch):
    """torch as on a machine without a GPU."""
    usual = torch.empty

    def empty(*sizes, device=None, **given):
        if str(device).startswith("cuda"):
            raise AssertionError("Torch not compiled with CUDA enabled")
        return usual(*sizes, device=device, **given)

    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.parametrize(("device", "variable"), [("sm_90", "CUDA_VISIBLE_DEVICES"), ("gfx942", "HIP_VISIBLE_DEVICES")])
def test_a_backend_for_any_device_never_takes_the_cpu_silently(site, monkeypatch, device, variable):
    site.plugin("acme", extra="preferred_block_size=32,")
    for name in ("acme", "reference"):
        choice = attncore.select(backend=name, host=attncore.Host.assume(device), **FIELDS)
        assert choice.config().device == "cuda:0"
        assert choice.create(device="cpu").config.device == "cpu"
        assert choice.create(device="meta").config.device == "meta"
        with monkeypatch.context() as patch:
            without_a_gpu(patch)
            with pytest.raises(ValueError, match=r"^device: 'cuda:0' cannot be used here: Torch not") as caught:
                choice.create()
        assert f"first device of the host ({choice.host.device}): install a torch that has it" in str(caught.value)
        assert f"create(device='cpu') or, for a command, by an empty {variable}" in str(caught.value)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *sizes, device: None)  # a torch that has the device
            assert choice.create().config.device == "cuda:0"


def test_the_device_is_the_hosts(site):
    site.plugin("cudaic")
    source = (site.folder / "attn_cudaic.py").read_text().replace('"any"', '"cuda"')
    site.module("attn_cudaic", source)
    named = attncore.select(backend="cudaic", host=attncore.Host.assume("sm_90"), **FIELDS)
    assert named.create().config.device == "cuda:0"


def test_a_library_that_cannot_be_imported_is_told_with_its_cause(site):
    site.plugin("acme", heavy="raise OSError('libacme.so: undefined symbol: acme_attend')")
    choice = attncore.select(backend="acme", **FIELDS)
    with pytest.raises(
        attncore.PluginError, match=r"acme \(attn-acme 1.0\): importing attn_acme_heavy:Backend"
    ) as caught:
        choice.create()
    assert "undefined symbol" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_factory_that_makes_something_else(site):
    site.plugin("acme", heavy="Backend = dict")
    with pytest.raises((TypeError, ValueError)):
        attncore.select(backend="acme", **FIELDS).create()
    site.module("attn_acme_heavy", "def Backend(config): return 3")
    sys.modules.pop("attn_acme_heavy")
    with pytest.raises(TypeError, match="factory: attn_acme_heavy:Backend made a int"):
        attncore.select(backend="acme", **FIELDS).create()


def test_the_environment_names_the_backend_where_the_request_does_not(site, monkeypatch):
    site.plugin("acme")
    monkeypatch.setenv("ATTNCORE_BACKEND", "reference")
    choice = attncore.select(**FIELDS)
    assert choice.name == "reference"
    assert "named by ATTNCORE_BACKEND" in choice.explain()
    assert attncore.select(backend="acme", **FIELDS).name == "acme"
    monkeypatch.setenv("ATTNCORE_BACKEND", "flash")
    with pytest.raises(attncore.NoBackendError, match="backend: 'flash', named by ATTNCORE_BACKEND, cannot be used"):
        attncore.select(**FIELDS)


def test_no_backend_lists_every_candidate(site, monkeypatch):
    monkeypatch.setenv("ATTNCORE_PLUGINS", "")
    with pytest.raises(attncore.NoBackendError) as caught:
        attncore.select(**FIELDS)
    words = str(caught.value)
    assert words.startswith("no backend can be used on ")
    for name in ("reference (attncore", "flash: not installed", "rocm: not installed"):
        assert name in words


def test_reasons_are_by_candidate(site):
    site.plugin("acme")
    choice = attncore.select(host=attncore.Host.assume("sm_90"), **{**FIELDS, "head_size": 80})
    assert choice.name == "reference"
    assert [reason.code for reason in choice.reasons["acme"]] == ["head_size"]
    assert [reason.code for reason in choice.reasons["flash"]] == ["not_installed"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"head_sise": 64}, "head_sise: a request has no such field; did you mean head_size?"),
        ({"num_heads": None}, "num_heads: None is not an integer"),
    ],
)
def test_fields_are_checked_by_name(site, fields, text):
    with pytest.raises(TypeError) as caught:
        attncore.select(**{**FIELDS, **fields})
    assert str(caught.value) == text


def test_a_request_must_be_whole(site):
    with pytest.raises(TypeError, match="num_kv_heads: a request must state it"):
        attncore.select(num_heads=4)
    with pytest.raises(TypeError, match="request: 3 is not an AttentionRequest"):
        attncore.select(3)


def test_fields_beside_a_request_replace_its_own(site):
    request = attncore.AttentionRequest(**FIELDS)
    assert attncore.select(request, block_size=48).block_size == 48


def test_every_choice_is_a_line_of_the_log_and_rejections_are_at_debug(site, caplog):
    site.plugin("acme-logged")
    with caplog.at_level(logging.DEBUG, "attncore"):
        for _ in range(2):
            attncore.select(**FIELDS)
    chosen = [(entry.name, entry.message) for entry in caplog.records if entry.levelno == logging.INFO]
    line = "using acme-logged (attn-acme-logged 1.0) on cpu because its priority 5 comes first of 2 usable backends"
    assert chosen == [("attncore", line)] * 2
    assert any(entry.levelno == logging.DEBUG and "flash: not installed" in entry.message for entry in caplog.records)


@pytest.mark.parametrize(
    ("heavy", "text"),
    [
        ("raise SystemExit(4)", "importing attn_acme_heavy:Backend failed: SystemExit: 4"),
        ("def Backend(config): raise SystemExit(5)", "attn_acme_heavy:Backend failed: SystemExit: 5"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", "failed: E: without a message"),
    ],
)
def test_a_library_does_not_end_the_process(site, heavy, text):
    site.plugin("acme", heavy=heavy)
    with pytest.raises(attncore.PluginError) as caught:
        attncore.select(backend="acme", **FIELDS).create()
    assert text in str(caught.value)


@pytest.mark.parametrize("choose", [attncore.select, attncore.select_joint])
def test_a_host_is_a_host(site, choose):
    with pytest.raises(TypeError, match=r"^host: 'sm_90' is not a Host"):
        choose(host="sm_90", **FIELDS)


def test_a_choice_is_hashable_and_equal_ones_have_one_hash(site):
    site.plugin("acme", extra=OPTIONS)
    asked = {**FIELDS, "host": attncore.Host.assume("cpu"), "options": {"acme": {"pages": 3}}}
    one, other = attncore.select(**asked), attncore.select(**asked)
    assert one.negotiation.rejected or one.negotiation.usable
    assert one == other
    assert len({one, other}) == 1
    assert hash(one.negotiation) == hash(other.negotiation)
