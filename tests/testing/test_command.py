"""python -m attncore.testing: the table as Markdown and JSON, and exit codes."""

import json

from attncore.testing.__main__ import main


def test_json_is_the_table_and_nothing_else(capsys):
    assert main(["reference", "--json", "--examples", "3", "-k", "test_decode or sinks or kv_cache_layout"]) == 0
    shown = capsys.readouterr()
    table = json.loads(shown.out)
    assert (table["backend"], table["distribution"], table["failures"]) == ("reference", "attncore", [])
    rows = {row["capability"]: row for row in table["rows"]}
    assert rows["decode"] == {
        "capability": "decode", "state": "supported", "passed": 1, "failed": 0, "expected_failures": 0, "skipped": 0,
        "reason": "",
    }  # fmt: skip
    assert rows["layout HND"]["state"] == "unsupported"
    assert "passed" in shown.err


def test_the_table_is_printed_as_markdown(capsys):
    assert main(["reference", "--examples", "3", "-k", "test_decode"]) == 0
    shown = capsys.readouterr().out
    assert "attncore conformance: reference" in shown
    assert "| decode | supported | 1 of 1 |  |" in shown


def test_a_failure_exits_1_with_its_sentence(site, capsys):
    site.plugin("wrong")
    assert main(["wrong", "--json", "-k", "test_prefill"]) == 1
    (failure,) = json.loads(capsys.readouterr().out)["failures"]
    assert failure["test"] == "test_prefill"
    assert "wrote nothing" in failure["reason"]


def test_what_is_not_there_exits_2(site, capsys):
    assert main(["nobody"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("attncore: error: BACKEND: no distribution installed here provides 'nobody'")
    assert error.count("\n") == 1


def test_a_plugin_that_does_not_load_fails_once_and_skips_the_rest(site, capsys):
    site.plugin("raises", "raise RuntimeError('no licence file')")
    assert main(["raises", "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    reasons = {one["test"]: one["reason"] for one in table["failures"]}
    assert set(reasons) == {"test_the_plugin_loads", "test_the_spec_is_read_without_heavy_imports"}
    assert "no licence file" in reasons["test_the_plugin_loads"]


def test_what_cannot_run_here_exits_3(site, capsys):
    site.plugin("elsewhere", extra="requires=('a-library-nobody-has',)")
    assert main(["elsewhere"]) == 3
    assert "a-library-nobody-has is not installed" in capsys.readouterr().err
