"""What choices, specs, hosts and the list of backends print; names that are misspelt; torch's dtypes."""

import dataclasses
import typing

import pytest

import attncore
from attncore.cli import main
from attncore.registry.choice.installed import HEADERS
from attncore.registry.request_fields import RequestFields

FIELDS = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
EVIL = "<script>alert(1)</script>"


def few_lines(one):
    text = repr(one)
    assert max(map(len, text.splitlines())) <= 81, text
    assert len(text.splitlines()) <= 10
    return " ".join(text.split())


def test_a_record_of_a_plugin_is_short_whatever_its_exception_is(site):
    long = (
        "class E(Exception):\n def __repr__(self): raise RuntimeError\n def __str__(self): return 'x' * 10**6\nraise E"
    )
    site.plugin("odd", long)
    (record,) = (one for one in attncore.backends() if one.name == "odd")
    assert repr(record).startswith("<PluginRecord odd (attn-odd 1.0): broken,")
    assert len(repr(record)) < 400


def test_a_choice_and_what_it_is_of(site):
    choice = attncore.select(**FIELDS)
    assert few_lines(choice) == (
        "<Choice reference (attncore 0.1.0) on cpu: block_size 16, kv_cache_layout NHD, kv_cache_dtype auto, "
        "0 other usable, 3 not usable (explain() says why)>"
    )
    assert few_lines(choice.request).startswith("AttentionRequest(num_heads=4, num_kv_heads=2, head_size=64, dtype=")
    assert eval(repr(choice.request), {"AttentionRequest": attncore.AttentionRequest}) == choice.request
    assert few_lines(choice.negotiation) == "<Negotiation: reference chosen, 1 usable, 3 rejected>"
    assert "float16" in few_lines(choice.spec)
    assert few_lines(attncore.Host.assume("sm_90")).startswith("<Host cuda:sm_90: assumed, ")
    assert "prefill=<Choice reference" in repr(attncore.select_joint(**FIELDS))


def test_the_html_of_a_choice_escapes_what_plugins_say(site):
    site.plugin("acme", extra=f"check=lambda request, host: [{EVIL!r}],")
    markup = attncore.select(**FIELDS)._repr_html_()
    assert "attn-acme 1.0)</td><td style='text-align:left'>not usable</td>" in markup
    assert "&lt;script&gt;" in markup
    assert "<script" not in markup


def test_the_backends_here(site):
    site.plugin("acme")
    site.plugin("evil", f"raise RuntimeError({EVIL!r})")
    found = attncore.backends()
    states = {record.name: record.state for record in found}
    assert states == {"acme": "loaded", "evil": "broken", "reference": "loaded"} | dict.fromkeys(
        ("flash", "flashinfer", "rocm"), "not_installed"
    )
    lines = repr(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == [*HEADERS[:6]]  # what there is no room for stands below, with its header before it
    assert any(line.split() == ["acme", "attn-acme", "1.0", "loaded", "yes", "any"] for line in lines)
    assert any(line.split()[:3] == ["rocm", "attn-rocm", "not"] for line in lines)
    assert "reason: not installed; pip install" in " ".join(repr(found).split())
    assert found.runs_here == ("acme", "reference")
    assert "<script" not in found._repr_html_()


def test_it_says_what_runs_here_as_the_list_does(site, capsys):
    site.plugin("short", extra="requires=('numpy>=99',)")
    found = attncore.backends()
    assert "short" not in found.runs_here
    assert main(["list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == [*HEADERS]
    assert [line.split()[4] for line in printed[1:3]] == ["yes", "no"]
    assert printed[3].startswith("not installed: ")
    assert [record.name for record in found if record.state == "loaded"] == ["reference", "short"]
    assert "numpy" in repr(found)
    attncore.show_versions()
    assert repr(found) in capsys.readouterr().out


def test_versions_are_shown_whatever_the_environment_says(site, capsys, monkeypatch):
    monkeypatch.setenv("ATTNCORE_PLUGINS", "Not A Name!")
    attncore.show_versions()
    shown = capsys.readouterr().out
    assert "backends: ValueError: ATTNCORE_PLUGINS" in shown
    monkeypatch.delenv("ATTNCORE_PLUGINS")
    attncore.show_versions()
    shown = capsys.readouterr().out
    for what in ("attncore ", "python ", "numpy ", "torch ", "kernels ", "host ", "NAME  ", "reference "):
        assert f"\n{what}" in f"\n{shown}", what


def test_a_backend_and_its_layers_print():
    torch = pytest.importorskip("torch")
    backend = attncore.select(backend="reference", **FIELDS).create()
    assert few_lines(backend) == (
        "<ReferenceBackend 'reference' on cpu: float32, 4 heads (2 of keys) of size 64, block_size 16, "
        "kv_cache auto NHD, no layers yet>"
    )
    layer = backend.impl("layers.0", scale=0.125, sliding_window=4)
    assert few_lines(layer) == (
        "<ReferenceImpl of layer 'layers.0': scale 0.125, sliding_window 4, attn_type decoder, "
        "backend 'reference' on cpu>"
    )
    layer.k_scale = torch.ones((), device="meta")  # a tensor whose value nobody can read
    assert "k_scale <Tensor>" in few_lines(layer)
    assert "not shown" in repr(object.__new__(type(layer)))
    assert "not shown" in repr(object.__new__(type(backend)))


def test_the_typed_fields_are_those_of_a_request():
    of_request = typing.get_type_hints(attncore.AttentionRequest)
    torch = pytest.importorskip("torch")
    typed = typing.get_type_hints(RequestFields, localns={"torch": torch})
    assert list(typed) == [one.name for one in dataclasses.fields(attncore.AttentionRequest)]
    for name in ("dtype", "kv_cache_dtype"):
        assert typed.pop(name) == of_request[name] | torch.dtype
    assert typed == {name: of_request[name] for name in typed}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_head": 1}, "num_head: a request has no such field; did you mean num_heads?"),
        ({"features": ["sliding_windw"]}, "did you mean sliding_window?"),
        ({"dtype": "bfloat6"}, "dtype: 'bfloat6' is not one of float16, bfloat16, float32; did you mean bfloat16?"),
        ({"policy": "falback"}, "; did you mean fallback?"),
        ({"backend": "refrence"}, "correct the name (did you mean reference?), or install what provides it"),
    ],
)
def test_a_misspelt_word_names_the_one_that_was_meant(site, fields, text):
    with pytest.raises((ValueError, TypeError, attncore.NoBackendError)) as caught:
        attncore.select(**{**FIELDS, **fields})
    assert text in str(caught.value)


def test_dtypes_of_torch_are_taken_by_name(site):
    torch = pytest.importorskip("torch")
    fields = {**FIELDS, "dtype": torch.bfloat16}
    assert attncore.select(**fields) == attncore.select(**{**FIELDS, "dtype": "bfloat16"})
    for dtype, name in ((torch.float8_e4m3fn, "fp8_e4m3"), (torch.float8_e5m2, "fp8_e5m2"), (torch.half, "float16")):
        assert attncore.AttentionRequest(**{**fields, "kv_cache_dtype": dtype}).kv_cache_dtype == name
    config = attncore.BackendConfig(4, 2, 64, torch.bfloat16, 16, kv_cache_dtype=torch.float16)
    assert (config.dtype, config.kv_cache_dtype) == ("bfloat16", "float16")
    spec = attncore.BackendSpec(
        "acme", api=1, factory="a:B", devices={"any": 1}, dtypes={torch.bfloat16}, head_sizes={64}, block_sizes={16},
        kv_cache_dtypes={torch.float8_e4m3fn},
    )  # fmt: skip
    assert (spec.dtypes, spec.kv_cache_dtypes) == ({"bfloat16"}, {"fp8_e4m3"})
    with pytest.raises(ValueError, match="dtype: 'int8' is not one of"):
        attncore.AttentionRequest(**{**FIELDS, "dtype": torch.int8})
