"""Files from outside, changed at random: an answer, or one line that says what is wrong; nothing else, and no wait."""

import contextlib
import io
import json
import sys
import tempfile
from unittest import mock

import pytest
from fuzz.budget import examples
from fuzz.outcomes import outcome
from fuzz.texts import texts
from hypothesis import given
from hypothesis import strategies as st

from attncore import AttentionRequest
from attncore.cli import main
from attncore.json_lines import list_builder
from attncore.registry.request_from_config_json import read
from attncore.replay.traces.read_trace import read_trace
from attncore.replay.traces.trace import Trace, TraceError

LAYOUTS = [["--layout", layout] for layout in ("common", "flash", "flashinfer", "rocm")]
STEPS = [["--speculative", "2"], ["--context-parallel", "2:1:2"], ["--groups", "full:4,window:4:8"]]


SMALL = 1 << 16
"""The limit of an answer, lower, so that what it lets through is written in no time."""


def run(data, *words):
    """The command over bytes on standard input: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    list_builder._builder.cache_clear()
    with (
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(data))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(["build", "--max-answer", str(SMALL), *words])
    list_builder._builder.cache_clear()
    return code, out.getvalue(), err.getvalue()


def check_run(data, *words):
    runs = [run(data, "--kernels", kernels, *words) for kernels in ("cython", "numba")]
    assert runs[0] == runs[1]
    code, out, err = runs[0]
    for line in out.splitlines():
        answer = json.loads(line, parse_constant=pytest.fail)
        assert isinstance(answer, dict)
        assert len(line) < 1 << 18
    assert code in (0, 2)
    assert bool(err) == (code == 2)
    if err:
        assert err.count("\n") == 1
        assert err.isprintable() or err[:-1].isprintable()
        assert len(err) < 2500
        assert err.startswith(
            ("line ", *(f"attncore: error: standard input is {what}" for what in ("empty", "gzipped")))
        )


@examples(150)
@given(data=texts("lines"), layout=st.sampled_from(LAYOUTS))
def test_lines_of_the_list_builder(data, layout):
    check_run(data, *layout)


@examples(100)
@given(data=texts("steps"), options=st.sampled_from(STEPS))
def test_lines_of_the_persistent_builder(data, options):
    check_run(data, *options)


def read_with(reader, data):
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return reader(file.name)


@examples(150)
@given(data=texts("traces"), most=st.none() | st.integers(0, 3), seconds=st.sampled_from([0.5, 10.0, float("inf")]))
def test_traces(data, most, seconds):
    try:
        trace = read_with(lambda name: read_trace(name, most, seconds), data)
    except TraceError as error:
        text = str(error)
    else:
        check_trace(trace)
        return
    assert text.isprintable()
    assert len(text) < 1000


def check_trace(trace):
    assert isinstance(trace, Trace)
    arrivals = [request.arrival for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert all(1 <= request.prompt_tokens < 2**31 for request in trace.requests)
    assert all(1 <= request.output_tokens < 2**31 for request in trace.requests)


@examples(150)
@given(data=texts("configs"), ranks=st.integers(1, 4))
def test_model_configurations(data, ranks):
    found = outcome(read_with, lambda name: read(name, tensor_parallel=ranks), data)
    if found[0] == "answer":
        assert outcome(AttentionRequest, **found[1])[0] in ("answer", "refused")
    else:
        assert found[0] == "refused"
        assert found[2].startswith(("config: ", "tensor_parallel: "))
        assert len(found[2]) < 1000
