"""examples/engine.py launches steps before it has read the tokens of those before them, several where it can.

On a CPU, over stand-ins for graphs and either transport. What fails in steps ahead is in test_engine_faults.py.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.captured_engine import graphs_on_cpu  # noqa: E402
from integrations.models import DECODERS, decoder, greedy  # noqa: E402
from integrations.test_engine import is_empty, prompts, soak  # noqa: E402
from run import SampledTokens, Tokens  # noqa: E402

LIMITS = {"num_blocks": 60, "max_num_reqs": 4, "max_num_batched_tokens": 32, "block_size": 8}


@pytest.fixture(params=["copy", "graph"])
def captured(request, monkeypatch):
    with graphs_on_cpu(request.param, monkeypatch) as options:
        yield options


@pytest.fixture
def ahead(captured):
    """``ahead(name)`` is an engine, whose ``lengths`` are those of its runs of several steps."""

    def made(name="llama", **options):
        engine = Engine(decoder(name), **{**LIMITS, **captured, **options})
        engine.lengths, run_ahead = [], engine.builder.run_ahead
        engine.builder.run_ahead = lambda count, **more: engine.lengths.append(count) or run_ahead(count, **more)
        return engine

    return made


def run_all(engine):
    while engine.running or engine.waiting:
        engine.step()


@pytest.mark.parametrize("name", DECODERS)
def test_every_request_says_what_it_says_alone(ahead, name):
    engine = ahead(name)
    asked = prompts(7, 60)
    assert engine.complete(asked, 20) == [greedy(engine.model, prompt, 20) for prompt in asked]
    assert max(engine.lengths) == 8
    assert is_empty(engine)
    assert sorted(engine.sampled.free) == [1, 2, 3, 4]


@pytest.mark.parametrize("steps", [0, 1, 3, 20])
def test_however_many_steps_are_launched_ahead(ahead, steps):
    engine = ahead(ahead=steps)
    asked = prompts(3, 30)
    assert engine.complete(asked, 30) == [greedy(engine.model, prompt, 30) for prompt in asked]
    assert max(engine.lengths, default=steps) == steps


def test_a_number_of_steps_below_0_is_refused(ahead):
    with pytest.raises(ValueError, match=r"^ahead: -1 is below 0"):
        ahead(ahead=-1)


@pytest.mark.parametrize(("steps", "order"), [(0, "LRLRLR"), (1, "LLRLRLRR"), (8, "LLRR")])
def test_what_runs_next_is_launched_before_tokens_are_read(ahead, monkeypatch, steps, order):
    engine = ahead(ahead=steps)
    seen, fetch, tolist = [], SampledTokens.fetch, Tokens.tolist
    monkeypatch.setattr(SampledTokens, "fetch", lambda self: seen.append("L") or fetch(self))
    monkeypatch.setattr(Tokens, "tolist", lambda self: seen.append("R") or tolist(self))
    engine.complete([[1, 2, 3]], 3 if not steps else 4)
    assert "".join(seen) == order


def test_a_stop_token_in_the_middle_of_a_run_ends_its_request_alone(ahead):
    engine = ahead()
    asked = prompts(4, 20, seed=1)
    said = [greedy(engine.model, prompt, 30) for prompt in asked]
    for at in (1, 4, 8, 12):
        requests = [engine.add_request(asked[0], 30, stop=(said[0][at],))]
        requests += [engine.add_request(prompt, 30) for prompt in asked[1:]]
        run_all(engine)
        assert requests[0].output == said[0][: said[0].index(said[0][at]) + 1]
        assert [request.output for request in requests[1:]] == said[1:]
        assert is_empty(engine)
    assert 8 in engine.lengths


def test_who_is_cancelled_while_steps_run_leaves_the_others(ahead):
    engine = ahead()
    asked = prompts(4, 20, seed=2)
    for steps in (1, 2, 3):
        requests = [engine.add_request(prompt, 40) for prompt in asked]
        for _ in range(steps + 1):
            engine.step()
        assert engine.runs
        engine.cancel(requests[1])
        late = engine.add_request(asked[1][::-1], 6)  # takes its place on the device, and its blocks
        run_all(engine)
        for request in (requests[0], *requests[2:], late):
            prompt = request.tokens[: request.num_prompt]
            assert request.output == greedy(engine.model, prompt, request.max_new_tokens)
        assert is_empty(engine)


def test_all_are_cancelled_while_steps_run(ahead):
    engine = ahead()
    prompt = prompts(1, 20)[0]
    for count in (1, 2, 3):
        request = engine.add_request(prompt, 30)
        for _ in range(count):
            engine.step()
        engine.cancel(request)
        assert is_empty(engine)
        assert engine.complete([prompt[::-1]], 12) == [greedy(engine.model, prompt[::-1], 12)]


def test_who_arrives_in_a_run_joins_behind_it(ahead):
    engine = ahead()
    asked = prompts(3, 20, seed=3)
    first = [engine.add_request(prompt, 40) for prompt in asked[:2]]
    while not engine.lengths:
        engine.step()
    late = engine.add_request(asked[2], 12)
    engine.step()
    assert late.id in engine.running
    run_all(engine)
    assert [one.output for one in first] == [greedy(engine.model, prompt, 40) for prompt in asked[:2]]
    assert late.output == greedy(engine.model, asked[2], 12)


def test_with_few_blocks_runs_get_shorter_and_requests_are_computed_again(ahead):
    engine = ahead("mistral", num_blocks=13, max_num_reqs=6, max_num_batched_tokens=64, block_size=4)
    asked = prompts(6, 30, seed=5)
    assert engine.complete(asked, 16) == [greedy(engine.model, prompt, 16) for prompt in asked]
    assert engine.preemptions > 3
    assert 1 < min(engine.lengths) < 8
    assert is_empty(engine)


def test_tokens_stream_in_order(ahead):
    engine = ahead()
    asked = prompts(6, 40)
    came = list(engine.generate(asked, 20))
    for number, prompt in enumerate(asked):
        assert [token for of, token in came if of == number] == greedy(engine.model, prompt, 20)


def test_an_interrupt_between_the_replays_of_a_run(ahead, monkeypatch):
    engine = ahead()
    asked = prompts(3, 20, seed=4)
    requests = [engine.add_request(prompt, 30) for prompt in asked]
    for replays in (0, 1, 5):
        engine.lengths.clear()
        while not engine.lengths:
            engine.step()
        count, sound = iter(range(replays)), engine._forward

        def forward(metadata, count=count, sound=sound):
            if next(count, None) is None:
                raise KeyboardInterrupt
            return sound(metadata)

        with monkeypatch.context() as broken:
            broken.setattr(engine, "_forward", forward)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert (engine.running, len(engine.runs), len(engine.batch)) == ({}, 0, 0)
    run_all(engine)
    assert [request.output for request in requests] == [greedy(engine.model, prompt, 30) for prompt in asked]
    assert is_empty(engine)


@pytest.mark.parametrize("fails", ["launched", "read"])
def test_a_run_that_fails_where_a_stop_token_was_sampled_drops_nobody(ahead, monkeypatch, fails):
    """A request that has ended in what was not read yet must not be waited for beyond its end."""
    engine = ahead()
    asked = prompts(2, 20, seed=6)
    said = [greedy(engine.model, prompt, 30) for prompt in asked]
    said[0] = said[0][: said[0].index(said[0][4]) + 1]
    requests = [engine.add_request(asked[0], 30, stop=said[0][-1:]), engine.add_request(asked[1], 30)]
    while not engine.lengths:
        engine.step()

    def fail(*args):
        raise RuntimeError("once")

    with monkeypatch.context() as broken:
        broken.setattr(*((engine, "_forward", fail) if fails == "launched" else (Tokens, "tolist", fail)))
        engine.step()
    assert requests[0].finished == (fails == "launched")  # what ran before was read
    assert [*engine.suspects] == requests[fails == "launched" :]
    run_all(engine)
    assert [request.output for request in requests] == said
    assert [request.error for request in requests] == [None, None]


def test_what_ran_before_a_request_failed_alone_is_kept(ahead, monkeypatch):
    engine = ahead()
    prompt = prompts(1, 20, seed=6)[0]
    request = engine.add_request(prompt, 30)
    while not engine.lengths:
        engine.step()

    def fail(metadata):
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(engine, "_forward", fail)
    assert engine.step() == [request]
    assert str(request.error) == "device-side assert"
    assert request.output == greedy(engine.model, prompt, 9)
    assert is_empty(engine)


def test_where_each_step_is_planned_on_the_host_one_is_launched_ahead(captured, monkeypatch):
    from attncore import MetadataBuilder

    def refuse(self, *args, **more):
        raise ValueError("run_ahead: backend plans each step")

    monkeypatch.setattr(MetadataBuilder, "run_ahead", refuse)
    engine = Engine(decoder("llama"), **LIMITS, **captured)
    asked = prompts(4, 30)
    assert engine.ahead == 1
    assert engine.complete(asked, 12) == [greedy(engine.model, prompt, 12) for prompt in asked]


def test_a_soak_with_steps_ahead(captured):
    cancelled, preemptions = soak(400, 20, **{**captured, "graph_sizes": (2, 4, 8, 12)})
    assert cancelled > 5
    assert preemptions > 10
