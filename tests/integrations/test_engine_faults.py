"""examples/engine.py: what is refused when a request arrives, and a step that fails, for one request or for all."""

import logging
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.captured_engine import graphs_on_cpu  # noqa: E402
from integrations.models import decoder, greedy  # noqa: E402
from integrations.test_engine import is_empty, prompts  # noqa: E402


@pytest.fixture(params=["eager", "copy", "graph"])
def options(request, monkeypatch):
    """An engine that reads each step before the next, and two that launch steps ahead, by either transport."""
    with nullcontext({}) if request.param == "eager" else graphs_on_cpu(request.param, monkeypatch) as options:
        yield options


@pytest.fixture
def engine(options):
    return Engine(decoder("llama"), num_blocks=40, max_num_reqs=4, max_num_batched_tokens=32, block_size=8, **options)


def run_all(engine, most=500):
    finished = []
    while engine.running or engine.waiting:
        finished += engine.step()
        most -= 1
        assert most, "it does not end"
    return finished


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 128, 2], r"^prompt: token 128 is outside 0\.\.127, the vocabulary"),
        ([-1], r"^prompt: token -1 is outside 0\.\.127"),
        ([2**63], "^prompt: token 9223372036854775808 is outside"),
        ([10**400], "^prompt: token "),
        ([10**5000], r"^prompt: token .* is outside 0\.\.127"),
        ([1.0], "^prompt: 'float' object cannot be interpreted as an integer; give a list of token ids"),
        (["1"], "^prompt: 'str' object"),
        ([None], "^prompt: 'NoneType' object"),
        ([1, True], "^prompt: 'bool' object cannot be interpreted as an integer; give a list of token ids"),
        (7, "^prompt: 'int' object is not iterable"),
        ([], "^prompt: length 0"),
    ],
)
def test_a_prompt_that_the_model_has_no_words_for(engine, prompt, message):
    for add in (engine.add_request, lambda prompt, count: engine.complete([[1], prompt], count)):
        with pytest.raises((ValueError, TypeError), match=message):
            add(prompt, 3)
    assert (engine.waiting, is_empty(engine)) == (type(engine.waiting)(), True)


def test_other_fields_of_a_request(engine):
    for field, value in (
        ("stop", (128,)),
        ("stop", ("a",)),
        ("temperature", float("nan")),
        ("temperature", -1),
        ("temperature", 1e300),
        ("temperature", "warm"),
        ("temperature", None),
        ("temperature", np.ones(2)),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^{field}: "):
            engine.add_request([1], 3, **{field: value})
    with pytest.raises(TypeError):
        engine.add_request([1], 2.5)
    with pytest.raises(TypeError, match=r"^max_new_tokens: True is not an integer"):
        engine.add_request([1], True)
    assert engine.complete([np.array([3, 4], np.int16)], np.int8(4)) == [greedy(engine.model, [3, 4], 4)]


@pytest.mark.parametrize("temperature", [Fraction(0), 10**38, np.float64(0.5), np.array(0.5)])
def test_a_temperature_is_read_when_its_request_arrives(engine, temperature):
    others = [engine.add_request([1, 2], 3)]
    request = engine.add_request([3], 3, temperature=temperature)
    assert type(request.temperature) is float
    others.append(engine.add_request([4], 3))
    run_all(engine)
    assert [one.output for one in others] == [greedy(engine.model, prompt, 3) for prompt in ([1, 2], [4])]
    assert (len(request.output), request.error, is_empty(engine)) == (3, None, True)


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_that_torch_cannot_have(threads):
    with pytest.raises(ValueError, match=f"^threads: {threads} is below 1"):
        Engine(decoder("llama"), threads=threads)


def failing(engine, monkeypatch, fails):
    """Has the engine's forward pass raise where ``fails(ids of the step's requests)``; the steps that failed."""
    sound, count = engine._forward, []

    def forward(metadata):
        built = engine.builder.last_metadata  # a stand-in for a graph has the metadata of its capture
        lens = built.host.query_start_loc.tolist()
        scheduled = [name for name, a, b in zip(built.req_ids, lens, lens[1:], strict=False) if b > a]
        if fails(scheduled):
            count.append(scheduled)
            raise RuntimeError("device-side assert")
        return sound(metadata)

    monkeypatch.setattr(engine, "_forward", forward)
    return count


def test_a_request_whose_step_fails_alone_is_dropped_and_the_others_finish(engine, monkeypatch, caplog):
    asked = prompts(6, 40, seed=2)
    requests = [engine.add_request(prompt, 6) for prompt in asked]
    failures = failing(engine, monkeypatch, lambda ids: requests[2].id in ids)
    with caplog.at_level(logging.WARNING, "engine"):
        finished = run_all(engine)
    assert sorted(request.id for request in finished) == [request.id for request in requests]
    assert "each runs alone now" in caplog.text
    assert len(failures) == 2
    assert str(requests[2].error) == "device-side assert"
    for request, prompt in zip(requests, asked, strict=True):
        if request is not requests[2]:
            assert (request.error, request.output) == (None, greedy(engine.model, prompt, 6))
    assert is_empty(engine)


@pytest.mark.parametrize("error", [RuntimeError("no place"), KeyboardInterrupt()])
def test_what_finished_before_its_step_failed_is_returned(engine, monkeypatch, error):
    """Two finish in one step, whose booking fails at the second of them."""
    asked = prompts(4, 20, seed=4)
    requests = [engine.add_request(prompt, count) for prompt, count in zip(asked, (4, 4, 9, 9), strict=True)]
    leave, left = engine._leave, []

    def leaving(request, again=False):
        left.append(request)
        if len(left) == 2:
            raise error
        leave(request, again)

    monkeypatch.setattr(engine, "_leave", leaving)
    finished = []
    for _ in range(500):
        try:
            finished += engine.step()
        except KeyboardInterrupt:
            continue
    assert sorted(request.id for request in finished) == [request.id for request in requests]
    assert [request.output for request in requests] == [
        greedy(engine.model, prompt, count) for prompt, count in zip(asked, (4, 4, 9, 9), strict=True)
    ]
    assert is_empty(engine)


def test_a_request_that_fails_late_is_dropped_too(engine, monkeypatch):
    asked = prompts(4, 20, seed=3)
    requests = [engine.add_request(prompt, 9) for prompt in asked]
    late, computed = len(asked[1]) + 5, engine.batch.num_computed_tokens
    failing(engine, monkeypatch, lambda ids: requests[1].id in ids and computed(requests[1].id) >= late)
    run_all(engine)
    assert [request.error is not None for request in requests] == [False, True, False, False]
    assert [request.output for request in requests if not request.error] == [
        greedy(engine.model, prompt, 9) for prompt in (asked[0], *asked[2:])
    ]
    assert is_empty(engine)


def test_steps_that_fail_for_their_size_run_one_by_one(options, monkeypatch):
    """With so few blocks that requests alone take those of others, and prompts in chunks."""
    engine = Engine(decoder("llama"), num_blocks=14, max_num_reqs=4, max_num_batched_tokens=16, block_size=8, **options)
    asked = prompts(5, 60, seed=4)
    requests = [engine.add_request(prompt, 20) for prompt in asked]
    failing(engine, monkeypatch, lambda ids: len(ids) > 2)
    run_all(engine, 2000)
    assert [(request.error, request.output) for request in requests] == [
        (None, greedy(engine.model, prompt, 20)) for prompt in asked
    ]
    assert is_empty(engine)


def test_a_model_that_always_fails_drops_every_request(engine, monkeypatch):
    requests = [engine.add_request(prompt, 6) for prompt in prompts(5, 30)]
    failing(engine, monkeypatch, lambda ids: True)
    run_all(engine)
    assert all(isinstance(request.error, RuntimeError) for request in requests)
    assert is_empty(engine)


def test_generate_raises_when_the_others_have_finished(engine, monkeypatch):
    asked = prompts(3, 20, seed=5)
    failing(engine, monkeypatch, lambda ids: 1 in ids)
    with pytest.raises(RuntimeError, match="device-side assert"):
        engine.complete(asked, 4)
    assert is_empty(engine)
    monkeypatch.undo()
    assert engine.complete(asked, 4) == [greedy(engine.model, prompt, 4) for prompt in asked]


def test_an_interrupted_step_is_run_again(engine, monkeypatch):
    def interrupt(metadata):
        raise KeyboardInterrupt

    asked = prompts(5, 40, seed=2)
    requests = [engine.add_request(prompt, 6) for prompt in asked]
    for _ in range(3):
        engine.step()
        with monkeypatch.context() as broken:
            broken.setattr(engine, "_forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    assert [request.id for request in engine.waiting] == [request.id for request in requests if not request.finished]
    run_all(engine)
    assert [request.output for request in requests] == [greedy(engine.model, prompt, 6) for prompt in asked]
    assert is_empty(engine)
