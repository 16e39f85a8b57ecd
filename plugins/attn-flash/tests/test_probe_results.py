"""What a build leaves out: found by calls, kept, and negotiated around from then on."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flash_standin as standin
import pytest
import torch
from attn_flash import __main__ as command
from attn_flash import doctor, probe, probe_results
from attn_flash.probe_results import ProbeResult
from attn_flash.spec import make_spec

import attncore
from attncore import AttentionRequest, Host
from attncore.kept_files import cache_folder
from attncore.registry.plugins import load

CPU = torch.device("cpu")
LIBRARY = "flash-attn 2.8.3.post2"
VARIANTS = ["fa3", "fa3_vllm", "fa4", "fa2", "fa3_latent", "fa3_vllm_latent"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A library file of generation 2, with the distribution's version, on this machine."""
    file = tmp_path / "flash_attn_2_cuda.so"
    file.write_text("a build")
    monkeypatch.setattr(probe_results, "library_file", lambda generation: file if generation == "2" else None)
    monkeypatch.setattr(probe_results, "library", lambda generation: LIBRARY if generation == "2" else None)
    load.forget()
    yield file
    load.forget()


def made_by_calls(*lacks: str, waits: bool = False) -> ProbeResult:
    found, synchronises = probe.generation2_lacks(standin.Generation2(lacks, waits=waits), CPU)
    return ProbeResult(LIBRARY, "a GPU", lacks=found, synchronises=synchronises)


def test_calls_find_what_is_left_out() -> None:
    sizes = [f"head_size {size}" for size in range(8, 257, 8) if size not in (64, 128)]
    found = made_by_calls("logits_soft_cap", "alibi", *sizes)
    assert found.missing("").keys() == {"logits_soft_cap", "alibi", "alibi_standard"}
    assert found.lacks["logits_soft_cap"] == "This flash attention build does not support logits_soft_cap."
    assert set(range(8, 257, 8)) - found.head_sizes == {64, 128}
    assert (found.missing("dtype"), found.synchronises) == ({}, False)


def test_a_complete_build_lacks_nothing() -> None:
    assert made_by_calls().lacks == {}


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
def test_a_model_that_is_made_in_its_own_dtype_changes_no_finding() -> None:
    """Engines make layers under the model's dtype as torch's default."""
    assert made_by_calls().lacks == {}
    for sinks in (True, False):
        assert probe.generation3_lacks(standin.Generation3(sinks=sinks).library(), CPU) == {}


def test_a_dtype_that_is_left_out() -> None:
    found = made_by_calls("torch.float16")
    assert list(found.lacks) == ["dtype float16"]


def test_a_library_of_which_nothing_runs() -> None:
    with pytest.raises(RuntimeError, match="was left out"):
        made_by_calls("torch.float16", "torch.bfloat16")


def test_a_decode_function_that_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    library = standin.Generation2()
    waiting = standin.Generation2(waits=True)
    strict: list[bool] = []

    def decode(*args: Any, **given: Any) -> Any:
        return (waiting if strict else library).flash_attn_with_kvcache(*args, **given)

    class Strict:
        def __enter__(self) -> None:
            strict.append(True)

        def __exit__(self, *_: object) -> None:
            strict.clear()

    monkeypatch.setattr(probe, "_no_synchronisation", lambda device: Strict())
    functions = type("Functions", (), {"flash_attn_with_kvcache": staticmethod(decode)})()
    functions.flash_attn_varlen_func = library.flash_attn_varlen_func
    assert probe.generation2_lacks(functions, CPU) == ({}, True)


def test_findings_are_kept_until_the_library_changes(installed: Path) -> None:
    assert probe_results.read("2") is None
    found = made_by_calls("alibi")
    probe_results.write("2", found)
    assert probe_results.read("2") == found
    installed.write_text("another build")
    assert probe_results.read("2") is None


def edited(**fields: object) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda file: (file.unlink(), make(file))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_text(""),
    "a list": lambda file: file.write_text("[]"),
    "no fields": lambda file: file.write_text("{}"),
    "a field": lambda file: file.write_text('{"library": "x"}'),
    "numbers": lambda file: file.write_text('{"library": 1, "device": 2, "lacks": 3}'),
    "deep": lambda file: file.write_text("[" * 100_000),
    "huge": lambda file: file.write_text("9" * 5000),
    "no text": lambda file: file.write_bytes(b"\xff"),
    "no size": edited(lacks={"head_size x": "no"}),
    "huge size": edited(lacks={"head_size " + "9" * 5000: "no"}),
    "no feature": edited(lacks={"wings": "no"}),
    "every size": edited(lacks={f"head_size {size}": "no" for size in range(8, 257, 8)}),
    "every dtype": edited(lacks={"dtype float16": "no", "dtype bfloat16": "no"}),
    "a number": edited(lacks={"alibi": 3}),
    "long": edited(fails="x" * 2000),
    "no flag": edited(synchronises=[1]),
    "pipe": replaced(os.mkfifo),
    "folder": replaced(os.mkdir),
    "every user's": lambda file: file.chmod(0o666),
    "another user's": lambda file: os.chown(file, 12345, 12345),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_findings_are_ignored_with_a_reason(installed: Path, damage: str) -> None:
    if damage == "another user's" and os.geteuid():
        pytest.skip("only root can give a file away")
    found = made_by_calls()
    probe_results.write("2", found)
    (file,) = cache_folder("flash").glob("*.json")
    DAMAGE[damage](file)
    assert probe_results.read("2") is None
    (why,) = probe_results.ignored("2")
    assert str(file) in why
    assert doctor.facts(Host.assume("cpu"))["variant fa2 kept"] == f"ignored: {why}"
    assert [name for name, _ in make_spec().by_variant] == VARIANTS
    if damage != "folder":  # which only its owner may delete
        probe_results.write("2", found)
        assert (probe_results.read("2"), probe_results.ignored("2")) == (found, [])


def test_whatever_calls_find_is_credible(installed: Path) -> None:
    sizes = [f"head_size {size}" for size in probe_results.HEAD_SIZES if size != 64]
    found = made_by_calls("sliding_window", "logits_soft_cap", "alibi", "torch.float16", *sizes)
    assert len(found.lacks) == len(sizes) + 5
    assert set(probe.FEATURES) < set(probe_results.FEATURES)
    assert set(probe.DTYPES) == set(probe_results.DTYPES)
    probe_results.write("2", found)
    assert probe_results.read("2") == found


def test_a_device_that_is_full_says_nothing_of_the_library(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = standin.install(monkeypatch, "2", standin.Generation2())

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(library, "flash_attn_varlen_func", full)
    with pytest.raises(torch.OutOfMemoryError):
        probe.found("2", CPU)
    assert probe_results.read("2") is None


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("2", 2), ("--generation", 2)])
def test_the_command_takes_no_arguments(
    argument: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe_results, "library", lambda generation: pytest.fail("it calls all the same"))
    with pytest.raises(SystemExit) as end:
        command.main([argument])
    assert end.value.code == status
    assert "usage: python -m attn_flash" in "".join(capsys.readouterr())


def test_a_folder_that_cannot_be_written_to_keeps_none(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(installed))  # a file
    probe_results.write("2", made_by_calls())
    assert probe_results.read("2") is None


def test_a_user_without_a_home_keeps_none(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without a home
    probe_results.write("2", made_by_calls())
    assert probe_results.read("2") is None
    assert [name for name, _ in make_spec().by_variant] == VARIANTS


def test_the_spec_states_what_was_found(installed: Path) -> None:
    probe_results.write("2", made_by_calls("logits_soft_cap", "head_size 96", "torch.float16"))
    form = dict(make_spec().by_variant)["fa2"]
    assert "logits_soft_cap" not in form.features
    assert "as a call on a GPU showed (This flash attention build" in form.unsupported["logits_soft_cap"]
    assert 96 not in form.head_sizes
    assert 64 in form.head_sizes
    assert form.dtypes == {"bfloat16"}


def explained(device_name: str = "", **fields: Any) -> str:
    host = dataclasses.replace(Host.assume("sm_90", packages=standin.packages("2")), device_name=device_name)
    request: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
    request |= {"exclude": ("flashinfer",), **fields}  # which comes before generation 2, where it is installed
    return attncore.select(AttentionRequest(**request), host=host).explain()


def test_what_is_found_is_negotiated_around_in_the_same_process_too(installed: Path) -> None:
    assert "flash (attn-flash 0.1.0): chosen" in explained(logits_soft_cap=30.0)  # nothing is known yet
    probe_results.write("2", made_by_calls("logits_soft_cap", "head_size 96"))
    for text in (explained(logits_soft_cap=30.0), explained(head_size=96)):
        assert "flash (attn-flash 0.1.0): chosen" not in text
        assert "leaves it out, as a call on a GPU showed" in text
    load.forget()  # another process
    assert "logits_soft_cap not supported by variant fa2 (flash-attn 2.8.3.post2): this build" in explained(
        logits_soft_cap=30.0
    )
    assert "flash (attn-flash 0.1.0): chosen" in explained()


def test_a_library_that_fails_is_a_reason(installed: Path) -> None:
    probe_results.write("2", ProbeResult(LIBRARY, "a GPU", fails="ImportError: libcudart.so.11"))
    assert "failed when it was called on a GPU: ImportError: libcudart.so.11" in explained()


def test_a_failure_on_another_device_says_nothing_of_this_one(installed: Path) -> None:
    probe_results.write("2", ProbeResult(LIBRARY, "NVIDIA A100", fails="paged KV not supported on SM 8.0"))
    for name, refused in (("NVIDIA A100", True), ("NVIDIA H200", False), ("", True)):
        assert ("failed when it was called on NVIDIA A100" in explained(name)) == refused
    probe_results.write("2", ProbeResult(LIBRARY, "NVIDIA H200", lacks={"alibi": "left out"}))
    assert "alibi not supported" in explained("NVIDIA H200 MIG 1g.18gb", alibi=True), (
        "what a build lacks it lacks everywhere"
    )
    for asked, answers in (("", "NVIDIA H200"), ("NVIDIA H200", "NVIDIA H200"), ("NVIDIA A100", "NVIDIA A100")):
        found = probe_results.read("2", asked)
        assert found is not None
        assert found.device == answers
    probe_results.forget("2", "NVIDIA H200")
    assert probe_results.read("2", "NVIDIA H200") is None
    assert probe_results.read("2", "NVIDIA A100") is not None


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ImportError("flash_attn_2_cuda.so: undefined symbol"), False),
        (RuntimeError("Cannot re-initialize CUDA in forked subprocess"), False),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), True),
        (AssertionError("Paged KV not supported on SM 8.0"), True),
    ],
    ids=lambda value: str(value)[:30],
)
def test_only_failures_of_the_library_are_kept_for_other_processes(
    installed: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kept: bool
) -> None:
    def fails() -> Any:
        raise error

    monkeypatch.setattr(probe.generation2, "load", fails)
    found = probe.found("2", CPU)
    assert found.fails == str(error)
    assert probe_results.read("2", "cpu") == found, "this process goes around it"
    assert bool(list(cache_folder("flash").glob("*.json"))) == kept
    probe_results.forget("2")


def test_a_head_size_that_only_prompts_lack(installed: Path) -> None:
    library = standin.Generation2()
    whole = library.flash_attn_varlen_func

    def without_96(query: torch.Tensor, *args: Any, **given: Any) -> Any:
        if query.shape[-1] == 96:
            raise RuntimeError("left out of the build")
        return whole(query, *args, **given)

    library.flash_attn_varlen_func = without_96  # type: ignore[method-assign]
    assert probe.generation2_lacks(library, CPU)[0] == {"head_size 96": "left out of the build"}


def test_the_doctor_says_what_is_there(installed: Path) -> None:
    probe_results.write(
        "2", made_by_calls("logits_soft_cap", *(f"head_size {size}" for size in range(8, 257, 8) if size != 64))
    )
    facts = doctor.facts(Host.assume("sm_90"))
    assert facts["variant fa4"] == "flash-attn-4 is not installed"
    assert facts["variant fa2"] == f"{LIBRARY}, {installed}"
    assert facts["variant fa2 called"] == (
        "runs on a GPU; left out of this build: logits_soft_cap, all head sizes but 64"
    )
    assert json.loads(next(cache_folder("flash").glob("*.json")).read_text())["library"] == LIBRARY
