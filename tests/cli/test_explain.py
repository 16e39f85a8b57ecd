"""``attncore explain``."""

import json
import re

import pytest
from lookalikes import REGISTRY

from attncore.cli import main
from attncore.registry.choice import negotiate_installed

CONFIG = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "torch_dtype": "bfloat16"}


@pytest.fixture
def plugins(monkeypatch):
    """The lookalikes in place of what is installed."""
    monkeypatch.setattr(negotiate_installed, "registry", lambda: REGISTRY)
    monkeypatch.delenv("ATTNCORE_BACKEND", raising=False)


def ask(capsys, *words):
    code = main(["explain", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_design_documents_example(plugins, capsys):
    code, out, _ = ask(
        capsys,
        "--assume",
        "cuda:sm_90",
        "--block-size",
        "16",
        "--sliding-window",
        "4096",
        "--prefer",
        "flash,flashinfer",
    )
    assert code == 0
    assert "flashinfer (attn-flashinfer 0.1.0): chosen; preferred by the request, priority 70 on cuda:sm_90\n" in out
    assert (
        "flash (attn-flash 0.1.0): block_size 16 not supported by variant fa2 (flash-attn 2.8.3); supported: multiples "
        "of 256; install flash-attn-4\n"
    ) in out
    assert "acme (acme-attn 1.0): built for contract 2; this attncore speaks 1; install acme-attn<1\n" in out
    assert out.endswith(
        "block_size 16, kv_cache_layout NHD, kv_cache_dtype auto\n"
        "cuda_graph uniform_decode: steps in which every request decodes one token (of never, uniform_decode, uniform, "
        "always)\n"
    )


@pytest.mark.parametrize(
    ("assumed", "chosen"), [("gfx942", "rocm"), ("sm_90", "flashinfer"), ("sm_80", "flash"), ("cpu", "reference")]
)
def test_bare_devices(plugins, capsys, assumed, chosen):
    code, out, _ = ask(capsys, "--assume", assumed, "--json")
    report = json.loads(out)
    assert (code, report["chosen"]["name"]) == (0, chosen)
    assert [row["name"] for row in report["backends"] if row["chosen"]] == [chosen]


def test_without_a_model_a_common_one_is_told(plugins, capsys):
    _, out, _ = ask(capsys, "--assume", "cpu")
    assert out.startswith("request: num_heads 32, num_kv_heads 8, head_size 128, dtype bfloat16\nhost: cpu (assumed)\n")


def test_json_rows_hold_every_reason(plugins, capsys):
    _, out, _ = ask(capsys, "--assume", "sm_90", "--json", "--dtype", "float32", "--head-size", "80")
    rows = {row["name"]: row for row in json.loads(out)["backends"]}
    assert [reason["code"] for reason in rows["flashinfer"]["reasons"]] == ["dtype", "head_size"]
    assert rows["acme"]["state"] == "incompatible"
    assert rows["reference"]["usable"] is True


def test_no_usable_backend_is_3_and_still_explained(plugins, capsys):
    code, out, _ = ask(capsys, "--assume", "cpu", "--cuda-graph", "always", "--json")
    report = json.loads(out)
    assert (code, report["chosen"]) == (3, None)
    assert all(row["reasons"] for row in report["backends"])
    code, out, _ = ask(capsys, "--assume", "cpu", "--backend", "flash")
    assert code == 3
    assert out.endswith(
        "backend: 'flash', named by the request, cannot be used on cpu (policy strict: no other takes its place)\n"
    )


def test_latent_attention_has_one_head(plugins, capsys):
    sizes = ("--num-heads", "16", "--head-size", "576", "--head-size-v", "512")
    words = ("--assume", "cpu", "--use-mla", *sizes, "--json")
    code, out, _ = ask(capsys, *words)
    report = json.loads(out)
    assert (code, report["chosen"]["name"], report["request"]["num_kv_heads"]) == (0, "reference", 1)
    code, _, err = ask(capsys, *words, "--num-kv-heads", "2")
    assert code == 2
    assert "--num-kv-heads: 2 found; a latent cache" in err


def test_heads_of_several_sizes_are_asked_for_one_by_one(plugins, capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "head_dim": 256, "global_head_dim": 512}))
    code, _, err = ask(capsys, "--assume", "sm_90", "--config", str(path))
    assert (code, "global_head_dim: 512, but heads of other layers" in err) == (2, True)
    code, out, _ = ask(capsys, "--assume", "sm_90", "--config", str(path), "--head-size", "512", "--json")
    assert (code, json.loads(out)["request"]["head_size"]) == (0, 512)


def test_a_models_config_and_flags_over_it(plugins, capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    _, out, _ = ask(capsys, "--assume", "sm_90", "--config", str(path), "--tensor-parallel", "8", "--json")
    assert json.loads(out)["request"] == {"num_heads": 8, "num_kv_heads": 1, "head_size": 64, "dtype": "bfloat16"}
    _, out, _ = ask(capsys, "--assume", "sm_90", "--config", str(tmp_path), "--dtype", "float16", "--json")
    assert json.loads(out)["request"]["dtype"] == "float16"
    path.write_text(json.dumps({"text_config": {"model_type": "llama"}}))
    code, out, _ = ask(capsys, "--config", str(path), "--num-heads", "8", "--head-size", "64", "--json")
    assert (code, json.loads(out)["request"]["num_kv_heads"]) == (0, 8), "what the model does not state"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--config: PATH: n_head_kv: 3 does not divide n_head 32"),
        (["--num-heads", "5"], "--config: PATH: n_head_kv: 3 does not divide --num-heads 5"),
        (["--num-kv-heads", "6"], "--num-kv-heads: 6 does not divide n_head 32"),
        (["--num-kv-heads", "6", "--num-heads", "5"], "--num-kv-heads: 6 does not divide --num-heads 5"),
    ],
)
def test_a_field_is_named_as_where_it_stands(options, message, plugins, capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"n_head": 32, "n_head_kv": 3, "head_dim": 64}))
    code, _, err = ask(capsys, "--assume", "sm_90", "--config", str(path), *options)
    assert (code, err) == (2, f"attncore: error: {message.replace('PATH', str(path))}\n")


def test_a_cache_of_the_engines_own_is_asked_for(plugins, capsys):
    _, out, _ = ask(capsys, "--assume", "cpu", "--strided-kv-cache", "--json")
    report = json.loads(out)
    assert report["request"]["strided_kv_cache"] is True
    assert any("strided_kv_cache" in reason["message"] for row in report["backends"] for reason in row["reasons"])


def test_packages_can_be_assumed(plugins, capsys):
    words = ["--assume", "sm_90", "--json", "--backend", "flash"]
    _, out, _ = ask(capsys, *words, "--assume-package", "flash-attn-4==4.0.0b36")
    assert json.loads(out)["chosen"]["variant"] == "fa4"
    code, out, _ = ask(capsys, *words, "--assume-package", "flash-attn==")
    assert (code, json.loads(out)["chosen"]) == (3, None)


def test_a_package_that_no_plugin_requires_is_told(site, capsys):
    site.plugin("acme", extra="requires=('acme-kernels>=2',)")
    words = ["--assume", "cpu", "--backend", "acme", "--assume-package"]
    code, _, err = ask(capsys, *words, "Acme_Kernel==2.1")
    told = "no plugin installed here requires 'acme-kernel'; did you mean acme-kernels?"
    assert (code, err) == (3, f"attncore explain: warning: --assume-package: {told}\n")
    assert ask(capsys, *words, "acme-kernels==2.1")[::2] == (0, "")


def test_what_the_chosen_backend_reads_is_printed_as_show_prints_it(site, capsys):
    site.plugin("acme", extra="host_needs={'seq_lens', 'query_start_loc'}, host_lengths='exact', device_needs=()")
    code, out, _ = ask(capsys, "--assume", "cpu", "--backend", "acme")
    assert code == 0
    assert "host_needs" not in out
    code, out, _ = ask(capsys, "--assume", "cpu", "--backend", "acme", "--verbose")
    assert code == 0
    assert out.endswith(
        "\n\nmetadata that it reads in a step; builders make them, an engine need not care:\n"
        "on the host (host_needs): query_start_loc, seq_lens\non the device (device_needs): none\n"
    )
    chosen = json.loads(ask(capsys, "--assume", "cpu", "--backend", "acme", "--json")[1])["chosen"]
    assert (chosen["host_needs"], chosen["device_needs"]) == (["query_start_loc", "seq_lens"], [])


def test_joint(plugins, capsys):
    code, out, _ = ask(capsys, "--assume", "sm_90", "--joint", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["chosen"]["decode"]["device_needs"] == ["paged_kv_indices"]
    assert report["chosen"]["prefill"]["name"] == report["chosen"]["decode"]["name"] == "flashinfer"
    assert set(report["backends"]) == {"prefill", "decode"}
    _, out, _ = ask(capsys, "--assume", "sm_90", "--joint")
    assert "\nprefill:\n" in out
    assert "\ndecode:\n" in out
    _, out, _ = ask(capsys, "--assume", "sm_90", "--joint", "--verbose")
    assert "\nprefill on the host (host_needs): " in out
    assert "\ndecode on the host (host_needs): " in out


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--assume", "h100"], "--assume: 'h100'"),
        (["--num-heads", "x"], "--num-heads"),
        (["--num-heads", "0"], "--num-heads: 0"),
        (["--dtype", "half"], "--dtype"),
        (["--dtype", "bf16"], "; did you mean bfloat16?"),
        (["--feature", "wings"], "--feature"),
        (["--feature", "sink"], "; did you mean sinks?"),
        (["--config", "nowhere.json"], "--config: nowhere.json cannot be read"),
        (["--tensor-parallel", "2"], "--tensor-parallel: only with --config"),
        (["--assume-package", "torch"], "--assume-package: 'torch'"),
        (["--prefer", "Flash"], "--prefer: 'Flash'"),
    ],
)
def test_mistakes_are_one_line_that_names_the_field(plugins, capsys, words, names):
    code, out, err = ask(capsys, *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert names in err


def test_assumed_packages_are_those_of_the_requirement_however_written(site, capsys):
    site.plugin("acme", extra="requires=('Acme_Kernels>=2',)")
    for name in ("acme-kernels", "Acme.Kernels"):
        assert main(["explain", "--backend", "acme", "--assume-package", f"{name}==2.1"]) == 0
    assert main(["explain", "--backend", "acme", "--assume-package", "acme_kernels==1.9"]) == 3
    assert "acme-kernels 1.9 is installed" in capsys.readouterr().out


def test_a_preferred_backend_that_is_not_installed_is_said_and_no_error(site, capsys):
    site.plugin("acme")
    code, out, err = ask(capsys, "--prefer", "acmee,acme")
    assert code == 0
    assert "acme (attn-acme 1.0): chosen; preferred by the request" in out
    assert err == (
        "attncore explain: warning: --prefer: no backend 'acmee' is installed; installed: acme, reference; did you "
        "mean acme?\n"
    )


@pytest.mark.parametrize("option", ["--prefer", "--backend"])
def test_a_backend_that_is_asked_for_and_excluded_is_said(site, capsys, option):
    site.plugin("acme")
    _, out, err = ask(capsys, option, "acme", "--exclude", "acme")
    assert "excluded by the request" in out
    assert err == (
        f"attncore explain: warning: {option}: 'acme' is in --exclude, too, which wins; take it out of one of them\n"
    )


def test_a_misspelt_name_that_is_excluded_is_said_and_no_error(site, capsys):
    """One that resembles none may be that of another machine's."""
    site.plugin("acme")
    code, out, err = ask(capsys, "--exclude", "acmee,flash,other")
    assert code == 0
    assert re.findall(r"^(\w+): no distribution .* correct the name(.*)", out, re.MULTILINE) == [
        ("acmee", " (did you mean acme?), or leave it out of exclude"),
        ("other", ", or leave it out of exclude"),
    ]
    assert err == (
        "attncore explain: warning: --exclude: no backend 'acmee' is installed; installed: acme, reference; did you "
        "mean acme?\n"
    )
    assert "correct the name, or install what provides it" in ask(capsys, "--prefer", "other", "--exclude", "other")[1]


def test_what_an_assumed_machine_has_is_to_be_said(site, capsys):
    site.plugin("acme", extra="requires=('acme-kernels>=2',)")
    _, _, err = ask(capsys, "--assume", "sm_90")
    assert "sm_90 is assumed to have the packages that are named alone: say what is there by" in err
    assert "--assume-package acme-kernels==VERSION" in err
    assert "assumed to have" not in ask(capsys, "--assume", "cpu")[2]
    assert "which no GPU is needed" in ask(capsys, "--assume", "cpu", "--assume-package", "attn-acme==1")[2]


@pytest.mark.parametrize("asked", ["[1]", "None", "'no requirement!'", "{}"])
def test_a_reason_of_a_plugins_own_may_ask_for_anything(site, capsys, asked):
    check = f"check=lambda request, host: [__import__('attncore').Reason('requirement', 'no', {asked})]"
    site.plugin("acme", extra=check)
    code, out, err = ask(capsys, "--assume", "sm_90")
    assert code in (0, 3)
    assert "acme" in out
    assert "--assume-package" not in err
