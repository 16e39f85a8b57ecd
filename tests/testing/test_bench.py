"""attncore bench: turns, the machine, saved runs, and what counts as slower."""

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attncore.testing.bench import run as runs
from attncore.testing.bench import turns
from attncore.testing.bench.change import change
from attncore.testing.bench.machine import machine, machine_name
from attncore.testing.bench.run import PassError, Question, joined, measure
from attncore.testing.bench.saved_runs import MAX_RUNS, Row, Run, save
from attncore.testing.bench.saved_runs import load as load_and_left_out
from attncore.testing.engines import saved_steps
from attncore.testing.engines.timed_steps import REQUEST, Timed
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

REFERENCE = """
from attncore.reference import ReferenceBackend, ReferenceImpl

class Impl(ReferenceImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        {forward}
        return super().forward(query, key, value, kv_cache, metadata, output)

class Backend(ReferenceBackend):
    impl_class = Impl
"""
QUICK = {"seconds": 0.001, "timeout": 300.0}


def made(medians=(1e-6,) * 5, *, yardstick=1e-5, number=0, **changes):
    """A run of one row, made up; the yardstick takes ``yardstick`` in every pass."""
    row = Row("decode of 1", "plan", [*medians], [*medians], [*medians], [one / yardstick for one in medians], [])
    fields = {
        "backend": "acme",
        "machine": {"cpu": "a processor", "family": "6", "model": "1", "cores": "2"},
        "time": f"2026-11-22T00:00:{number:02}.000Z",
        "versions": {"python": "3.11.7"},
        "config": {"device": "cpu"},
        "steps": "",
        "rows": [row],
        "unsupported": {},
    }
    return Run(**{**fields, **changes})


def load(like, root):
    return load_and_left_out(like, root)[0]


def verdict(new, *saved):
    return change(new.rows[0], saved)


def noisy(seed, factor=1.0, noise=0.1):
    rng = random.Random(seed)
    return made([1e-6 * factor * (1 + noise * rng.random()) for _ in range(5)])


def test_a_first_run_has_nothing_to_be_slower_than():
    assert verdict(made()) == change(made().rows[0], [])
    assert (verdict(made()).verdict, verdict(made()).percent) == ("first run", None)


def test_variables_are_a_condition_as_options_are(tmp_path):
    plain = Question("acme", "attn-acme 1.0")
    assert runs._given(plain) == {}  # the runs of before are found
    tuned = runs._given(dataclasses.replace(plain, variables={"ATTNCORE_ACME_X": "1"}))
    other = runs._given(dataclasses.replace(plain, variables={"ATTNCORE_ACME_X": "2"}))
    folders = {made(config={"device": "cpu"} | given).folder(tmp_path) for given in ({}, tuned, other)}
    assert len(folders) == 3


def test_one_or_two_saved_runs_are_too_few_to_tell():
    for count in (1, 2):
        found = verdict(made([9e-6] * 5), *[made()] * count)
        assert (found.verdict, round(found.percent)) == ("too few runs", 800)
    assert verdict(made([9e-6] * 5), *[made()] * 3).verdict == "slower"


def test_what_the_passes_say_is_a_change_and_what_lies_among_them_is_none():
    usual = [made([1.0e-6, 1.1e-6, 1.05e-6])] * 3  # one of nine is left out at either end: 1.0 to 1.1 remain
    assert verdict(made([1.2e-6, 1.3e-6, 1.14e-6]), *usual).verdict == "slower"
    assert verdict(made([1.2e-6, 1.3e-6, 1.13e-6]), *usual).verdict == "same"
    assert verdict(made([0.8e-6, 0.9e-6, 0.96e-6]), *usual).verdict == "faster"
    assert verdict(made([0.8e-6, 0.9e-6, 0.98e-6]), *usual).verdict == "same"
    found = verdict(made([1.26e-6] * 3), *usual)
    assert (round(found.percent), round(found.low), round(found.high)) == (20, -5, 5)


def test_a_pass_that_other_work_spoiled_neither_hides_a_change_nor_makes_one():
    usual = [made([1e-6, 1e-6, 9e-6, 1e-6, 1e-6])] * 3
    assert verdict(made([1.3e-6, 1.3e-6, 1.3e-6, 1.3e-6, 0.9e-6]), *usual).verdict == "slower"
    assert verdict(made([1e-6, 1e-6, 1e-6, 9e-6, 9e-6]), *usual).verdict == "same"


def test_a_machine_that_is_slow_as_a_whole_is_no_change():
    usual = [made()] * 3
    assert verdict(made([2e-6] * 5, yardstick=2e-5), *usual).verdict == "same"
    assert verdict(made([1e-6] * 5, yardstick=2e-5), *usual).verdict == "same"
    assert verdict(made([2e-6] * 5, yardstick=1e-5), *usual).verdict == "slower"


def test_a_load_that_slows_the_row_more_than_the_yardstick_is_no_change():
    usual = [made()] * 3
    assert verdict(made([1.43e-6] * 5, yardstick=1.3e-5), *usual).verdict == "same"  # 10 % more than the yardstick's 30
    assert verdict(made([1.8e-6] * 5, yardstick=1.3e-5), *usual).verdict == "slower"  # 38 % more


def test_noise_alone_is_not_called_slower_and_a_quarter_more_is():
    verdicts, slower = [], []
    for seed in range(0, 2000, 10):
        saved = [noisy(seed + i) for i in range(5)]
        verdicts.append(verdict(noisy(seed + 6), *saved).verdict)
        slower.append(verdict(noisy(seed + 6, 1.25), *saved).verdict)
    assert verdicts.count("slower") == 0
    assert slower.count("slower") > 190


def test_runs_from_long_ago_say_nothing_of_what_is_usual():
    assert verdict(made([1.5e-6] * 5), made([9e-6] * 5), *[made()] * 5).verdict == "slower"
    assert len(verdict(made([1.5e-6] * 5), made([9e-6] * 5), *[made()] * 5).trend) == 7


def test_passes_of_two_runs_are_judged_as_one():
    first, second = made([1.5e-6] * 3), made([1e-6, 1e-6, 1.5e-6])
    assert verdict(first, *[made()] * 3).verdict == "slower"
    assert verdict(joined(first, second), *[made()] * 3).verdict == "same"
    assert len(first.rows[0].to_yardstick) == 6


def test_runs_are_kept_apart_by_what_must_be_the_same(tmp_path):
    save(made(), tmp_path)
    assert load(made(number=1), tmp_path) == [made()]
    other = {"cpu": "another", "family": "6", "model": "1", "cores": "2"}
    for changes in ({"machine": other}, {"backend": "b"}, {"config": {"device": "cuda:0"}}, {"steps": "12ab"}):
        assert load(made(**changes), tmp_path) == []
    assert load(made(versions={"python": "3.12.1"}), tmp_path) == []
    assert load(made(versions={"python": "3.11.9", "torch": "3.0"}), tmp_path) == [made()]


def test_runs_are_read_in_their_order_and_the_last_ones_only(tmp_path):
    for number in (3, 1, *range(4, 4 + MAX_RUNS)):
        save(made(number=number), tmp_path)
    times = [run.time for run in load(made(), tmp_path)]
    assert times == sorted(times)
    assert len(times) == MAX_RUNS
    assert times[-1] == made(number=3 + MAX_RUNS).time


def test_the_longest_run_is_read_again(tmp_path):
    """100 passes, all repeated, over the generated shapes and 32 saved steps, each of four parts."""
    figures = [1.2345678901234567e-6] * 200
    names = [f"step {number} of a file, decode of 1, prefill of 256" for number in range(36)]
    rows = [Row(name, part, *[figures] * 5) for name in names for part in ("build", "plan", "commit", "forward")]
    run = made(rows=rows)
    assert save(run, tmp_path).stat().st_size > 1 << 21
    assert load_and_left_out(run, tmp_path) == ([run], [])


def test_a_run_whose_figures_are_none_is_passed_over(tmp_path):
    save(made([0.0] * 5), tmp_path)
    save(made([float("nan")] * 5, number=1), tmp_path)
    assert load(made(), tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    ["", "null", "[" * 100_000, '{"format": 1}', {"format": 0}, {"rows": [{}]}, {"rows": [["x"]]}, {"time": 3}],
    ids=["empty", "null", "deep", "fields missing", "format", "row", "row's type", "time"],
)
def test_a_damaged_run_is_passed_over(tmp_path, damage):
    file = save(made(), tmp_path)
    save(made(number=1), tmp_path)
    file.write_text(damage if isinstance(damage, str) else json.dumps({**made().as_json(), **damage}))
    assert load(made(), tmp_path) == [made(number=1)]


@pytest.mark.parametrize("field", ["median", "to_yardstick"])
@pytest.mark.parametrize("figure", [5e-324, 1e-13, 1e13, 1e308])
def test_a_run_whose_figures_are_not_credible_is_left_out(tmp_path, field, figure):
    run = made()
    getattr(run.rows[0], field)[1] = figure
    name = save(run, tmp_path).name
    save(made(number=1), tmp_path)
    assert load_and_left_out(made(), tmp_path) == ([made(number=1)], [name])


@pytest.mark.parametrize("times", [0, 3])
def test_a_run_without_rows_or_with_one_several_times_is_left_out(tmp_path, times):
    """Three rows of one run are not three runs, which are enough to call a row slower."""
    run = made()
    name = save(made(rows=made([1e-7] * 5).rows * times), tmp_path).name
    assert load_and_left_out(run, tmp_path) == ([], [name])


@pytest.mark.parametrize("wrong", [{"step": ["decode of 1"]}, {"part": None}])
def test_a_run_whose_rows_have_no_names_is_left_out(tmp_path, wrong):
    run = made()
    name = save(made(rows=[dataclasses.replace(run.rows[0], **wrong)]), tmp_path).name
    assert load_and_left_out(run, tmp_path) == ([], [name])


def test_what_is_no_file_of_ours_is_not_waited_for(tmp_path):
    name = save(made(), tmp_path).name
    file = save(made(number=1), tmp_path)
    file.chmod(0o666)
    pipe = file.with_name(f"0{name}")
    os.mkfifo(pipe)
    assert load_and_left_out(made(), tmp_path) == ([made()], [pipe.name, file.name])


def test_a_row_without_figures_is_passed_over(tmp_path):
    save(made([]), tmp_path)
    assert load(made(), tmp_path) == []


def test_a_machine_is_named_after_its_processor_and_nothing_else(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Intel(R) Xeon(R) CPU @ 2.20GHz\n")
    facts = machine(info)
    assert facts == {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "family": "6", "model": "85", "cores": facts["cores"]}
    name = machine_name(facts)
    assert name.startswith(f"intel-xeon-{facts['cores']}-cores-")
    assert name != machine_name({**facts, "model": "86"})
    assert machine_name({**facts, "cpu": "../.."}).startswith("unknown-")
    assert machine(tmp_path / "none")["cpu"]


def test_turns_alternate_and_resets_are_not_timed():
    log = []
    calls = {
        "a": turns.Call(lambda: log.append("a") or time.sleep(0.001)),
        "b": turns.Call(lambda: log.append("b"), lambda: log.append("reset") or time.sleep(0.001)),
    }
    found = turns.in_turns(calls, 0.0)
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys("ab", turns.MIN_ROUNDS)
    assert min(found["a"]) >= 0.001
    assert sorted(found["b"])[4] < 0.001
    assert log.count("reset") == log.count("b") > turns.MIN_ROUNDS
    assert all(log[i - 1] == "reset" for i, one in enumerate(log) if one == "b")


def test_a_pass_times_the_backend_beside_the_reference(site):
    site.plugin("acme", heavy=REFERENCE.format(forward="import time; time.sleep(0.05)"), version="1.5")
    found = measure(Question("acme", "attn-acme 1.5", **QUICK), 1)
    assert {row.part for row in found.rows} == {"build", "plan", "commit", "forward"}
    assert len(found.rows) == 16
    assert found.versions["distribution"] == "attn-acme 1.5"
    assert (found.config["device"], found.config["head_size"]) == ("cpu", 64)
    for row in found.rows:
        assert len(row.median) == len(row.to_yardstick) == len(row.to_reference) == 1
        assert (row.median[0] > 0.05) == (row.part == "forward")
    (forward,) = (row for row in found.rows if (row.step, row.part) == ("decode of 1", "forward"))
    assert forward.to_reference[0] > 2


def prompt(length):
    """A line of saved steps: one prompt in blocks of 16."""
    sequence = {"seq_id": 0, "query_len": length, "context_len": 0, "block_table": [1, 2]}
    groups = [{"is_prompt": True, "sequences": [sequence]}]
    return json.dumps({"block_size": 16, "chunked_prefill": True, "groups": groups}) + "\n"


ONE_PLAN = """
    def plan(self, metadata):
        super().plan(metadata)
        Backend.last = metadata
"""


def test_a_library_that_keeps_one_plan_is_timed(site, tmp_path):
    """FlashInfer's: it refuses the layers of any other step (docs/contract.md), such as those before a commit."""
    refuses = "if metadata is not Backend.last: raise ValueError('metadata: not of the step that was planned last')"
    site.plugin("one", heavy=REFERENCE.format(forward=refuses) + ONE_PLAN)
    steps = tmp_path / "steps.jsonl"
    steps.write_text("".join(prompt(length) for length in (5, 30)))
    found = measure(Question("one", "attn-one 1.0", steps=steps, **QUICK), 1)
    assert len(found.rows) == 20


def test_each_timed_plan_finds_nothing_kept():
    """A backend that keeps its plan in `metadata.kept` plans once a step; the second time it would only look it up."""
    timed = Timed(Subject("reference", checks_needs=False), "decode of 1", REQUEST, None)
    seen = []
    timed.backend.plan = lambda metadata: seen.append(metadata.kept.setdefault("plan", len(seen)))
    timed.plan()
    timed.plan()
    assert seen == [0, 1]


def test_steps_of_a_phase_that_the_spec_has_not_are_unsupported(site):
    site.plugin("decodes", heavy=REFERENCE.format(forward="pass"), extra="phases={'decode'}")
    found = measure(Question("decodes", "attn-decodes 1.0", **QUICK), 1)
    assert {row.step for row in found.rows} == {"decode of 1", "decode of 32"}
    assert found.unsupported == dict.fromkeys(
        ("prefill of 256", "chunk of 128 beside 16 decodes"), "its spec declares no phase prefill"
    )


def test_steps_longer_than_the_spec_allows_are_unsupported(site):
    site.plugin("short", heavy=REFERENCE.format(forward="pass"), extra="max_model_len=600")
    found = measure(Question("short", "attn-short 1.0", **QUICK), 1)
    assert {row.step for row in found.rows} == {"decode of 32", "prefill of 256"}
    assert found.unsupported == {
        "decode of 1": "its spec says max_model_len=600, and this step has a request of 1001 tokens",
        "chunk of 128 beside 16 decodes": "its spec says max_model_len=600, and this step has a request of 640 tokens",
    }


def test_steps_of_more_blocks_than_the_spec_allows_are_unsupported(site):
    site.plugin("bytes", heavy=REFERENCE.format(forward="pass"), extra="max_block_id=255")
    found = measure(Question("bytes", "attn-bytes 1.0", **QUICK), 1)
    assert {row.step for row in found.rows} == {"decode of 1", "prefill of 256"}
    assert found.unsupported == {
        "decode of 32": "its spec says max_block_id=255, and this takes 561 blocks",
        "chunk of 128 beside 16 decodes": "its spec says max_block_id=255, and this takes 329 blocks",
    }


@pytest.mark.parametrize(("most", "kv_heads"), [(1, 8), (3, 4), (4, 2)])
def test_groups_are_no_larger_than_the_spec_allows(site, most, kv_heads):
    site.plugin("grouped", heavy=REFERENCE.format(forward="pass"), extra=f"max_group_size={most}")
    timed = Timed(Subject("grouped", checks_needs=False), "prefill of 256", REQUEST, None)
    assert (timed.config.num_heads, timed.config.num_kv_heads) == (8, kv_heads)


@pytest.mark.parametrize(("kv_heads", "said"), [(1, "8 not supported"), (3, "num_heads"), (0, "num_kv_heads")])
def test_other_heads_than_the_suites_are_timed_as_asked_or_refused(site, kv_heads, said):
    site.plugin("grouped", heavy=REFERENCE.format(forward="pass"), extra="max_group_size=4")
    with pytest.raises((ValueError, UnsupportedError), match=said):
        Timed(Subject("grouped", checks_needs=False), "prefill of 256", {**REQUEST, "num_kv_heads": kv_heads}, None)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        ("import os; os.abort()", "the process died of SIGABRT while forward of 'decode of 1' was timed"),
        ("import os; os._exit(0)", "the process ended without an answer while forward of 'decode of 1' was timed"),
        ("raise RuntimeError('no kernel')", "RuntimeError: no kernel while forward of 'decode of 1' was timed"),
        (
            "raise BaseExceptionGroup('a', [KeyboardInterrupt()])",
            "BaseExceptionGroup: a (1 sub-exception) while forward",
        ),
    ],
    ids=["crashes", "ends", "fails", "fails oddly"],
)
def test_a_backend_that_fails_is_said_to_with_where(site, forward, said):
    site.plugin("bad", heavy=REFERENCE.format(forward=forward))
    with pytest.raises(PassError, match=r"^NAME: bad cannot be timed: ") as error:
        measure(Question("bad", "attn-bad 1.0", **QUICK), 1)
    assert said in str(error.value)


def test_steps_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^--steps: .* cannot be read"):
        dataclasses.replace(Question("acme", ""), steps=tmp_path / "none").as_json(tmp_path / "copy")


def test_steps_are_a_file_of_a_limited_size(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text('{"block_size": 4}' + " " * 100)
    monkeypatch.setattr(saved_steps, "MAX_BYTES", 100)
    for file, said in (
        (tmp_path / "pipe", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path / "large", "is larger than 100 bytes"),
    ):
        with pytest.raises(ValueError, match=rf"^--steps: .* {said}"):
            runs.Question("acme", "", steps=file).as_json(tmp_path / "copy")


def test_it_runs_without_the_test_tools():
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('pytest', 'hypothesis', 'pytest_benchmark')));"
        "import attncore.testing.bench.run, attncore.testing.bench.one_pass"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
