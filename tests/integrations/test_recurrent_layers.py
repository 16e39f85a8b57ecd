"""Hybrid models of transformers through examples/engine.py: states in slots, tokens as those of the model alone."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.captured_engine import graphs_on_cpu  # noqa: E402
from integrations.hybrids import HYBRIDS, hybrid  # noqa: E402
from integrations.models import decoder, greedy  # noqa: E402

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder, StateGroup  # noqa: E402
from attncore.integrations.transformers import (  # noqa: E402
    attncore_context,
    capture_between_attention,
    compile_layers,
    paged_caches,
    recurrent_layers,
    select_for_model,
)

LENGTHS = (1, 40, 2, 23, 5, 31, 1, 12)
FEW = {"num_blocks": 10, "max_num_reqs": 4, "max_num_batched_tokens": 16, "block_size": 8}
"""So few blocks that requests are preempted, so few tokens a step that prompts run in chunks."""


def prompts():
    draw = random.Random(1)
    return [[draw.randrange(3, 97) for _ in range(length)] for length in LENGTHS]


def run(engine, asked, count):
    """The outputs of requests of which one arrives in every third step."""
    requests, steps, waiting = [], 0, list(asked)
    while waiting or engine.waiting or engine.running:
        if waiting and steps % 3 == 0:
            requests.append(engine.add_request(waiting.pop(0), count))
        engine.step()
        steps += 1
        assert steps < 1000
    assert not any(request.error for request in requests)
    return [request.output for request in requests]


def dirty(engine):
    """Fills every slot with what no request may see."""
    for slots in engine.caches.states._slots.values():
        for states in slots.kinds.values():
            for state in states.values():
                state.fill_(float("nan"))


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_request_says_what_it_says_alone(name):
    model = hybrid(name)
    assert len(recurrent_layers(model)) == (2 if name == "FalconH1" else 1)
    expected = [greedy(model, prompt, 12) for prompt in prompts()]
    engine = Engine(model, **FEW)
    at_once = [slots.continues_prompts for slots in engine.caches.states._slots.values()]
    assert at_once == [name != "Jamba"] * len(at_once)
    dirty(engine)
    assert run(engine, prompts(), 12) == expected
    assert engine.preemptions
    assert run(engine, prompts()[::-1], 12) == expected[::-1]  # in slots that others have left
    assert (len(engine.batch), engine.pool.num_free, len(engine.sampled.free)) == (0, 9, 4)


NORMS = {"left out": {"mamba_norm_before_gate": False}, "broadcast": {"mamba_norm_before_gate": True}}
"""Falcon-H1's norm gives (rows, size) for one token of each row; where the gate follows, that times (rows, 1, size)."""


@pytest.mark.parametrize("axis", NORMS)
def test_decodes_of_code_that_drops_an_axis_say_what_they_say_alone(axis):
    model = hybrid("FalconH1", mamba_rms_norm=True, **NORMS[axis])
    expected = [greedy(model, prompt, 12) for prompt in prompts()]
    engine = Engine(model, **FEW)
    at_once = [slots.batches_decodes for slots in engine.caches.states._slots.values()]
    assert at_once == [axis == "left out"] * 2
    dirty(engine)
    assert run(engine, prompts(), 12) == expected


@pytest.mark.parametrize("name", HYBRIDS)
def test_other_decodes_run_at_once(name):
    model = hybrid(name)
    slots = paged_caches(model, select_for_model(model).create(), num_blocks=2, num_slots=2).states._slots.values()
    assert all(one.batches_decodes for one in slots)


def test_parameters_that_stay_in_float32_do_not_decide_a_layer_s_dtype():
    """As transformers loads A_log of OLMo Hybrid, whatever dtype is asked for."""
    model = hybrid("Qwen3Next").bfloat16()
    (layer,) = recurrent_layers(model).values()
    for name in ("dt_bias", "A_log"):
        setattr(layer, name, torch.nn.Parameter(getattr(layer, name).float()))
    assert next(layer.parameters()).dtype is torch.float32
    engine = Engine(model, **FEW)
    dirty(engine)
    assert [len(output) for output in run(engine, prompts(), 4)] == [4] * len(LENGTHS)


def test_code_that_gives_something_else_is_refused():
    model = hybrid("Bamba")
    (layer,) = recurrent_layers(model).values()
    forward = layer.forward
    layer.forward = lambda hidden_states, cache_params, **more: forward(hidden_states, cache_params, **more)[..., :1]
    with pytest.raises(ValueError, match=r"gives \(1, 1, 1\) for 1 token of 32 numbers"):
        paged_caches(model, select_for_model(model).create(), num_blocks=2, num_slots=2)


@pytest.mark.parametrize("kind", [{}, {"name": "FalconH1", "mamba_rms_norm": True}])
@pytest.mark.parametrize("transport", ["none", "copy", "graph"])
def test_decodes_run_in_graphs(transport, kind, monkeypatch):
    """Stand-ins for graphs over padded steps, and steps ahead where the device makes them."""
    model = hybrid(**{"name": "Bamba", **kind})
    expected = [greedy(model, prompt, 12) for prompt in prompts()]
    with graphs_on_cpu("auto" if transport == "none" else transport, monkeypatch) as options:
        engine = Engine(model, **{**FEW, "num_blocks": 40}, **options)
        dirty(engine)
        assert run(engine, prompts(), 12) == expected
        assert engine.graphs


@pytest.mark.parametrize("fault", ["another's slot", "not reset", "not kept"])
def test_the_tokens_show_a_wrong_state(fault, monkeypatch):
    """What the tests above would not see if states did not matter."""
    from attncore.builder.persistent.state_step import StateStep

    model = hybrid("Bamba")
    expected = [greedy(model, prompt, 12) for prompt in prompts()]
    engine = Engine(model, **FEW)
    own_slot, own_initial = StateStep.state_slot.fget, StateStep.has_initial_state.fget
    if fault == "another's slot":
        monkeypatch.setattr(StateStep, "state_slot", property(lambda self: own_slot(self) * 0 + 1))
    elif fault == "not reset":
        monkeypatch.setattr(StateStep, "has_initial_state", property(lambda self: own_initial(self) | True))
        run(engine, prompts()[:4], 12)
        assert run(engine, prompts()[:4], 12) != expected[:4]
        return
    else:
        monkeypatch.setattr(StateStep, "has_initial_state", property(lambda self: own_initial(self) & False))
    assert run(engine, prompts(), 12) != expected


def test_a_model_runs_by_itself_beside_its_states():
    model = hybrid("Qwen3Next")
    before = greedy(model, prompts()[1], 6)
    engine = Engine(model, **FEW)
    assert run(engine, prompts()[1:2], 6) == [before]
    assert greedy(model, prompts()[1], 6) == before
    assert run(Engine(model, **FEW), prompts()[1:2], 6) == [before]  # a second engine over the same layers


def test_what_cannot_run_is_refused():
    model = hybrid("Jamba")
    choice = select_for_model(model, num_blocks=8, block_size=8)
    backend = choice.create("cpu")
    with pytest.raises(ValueError, match=r"num_slots: missing; JambaForCausalLM has 1 recurrent layer"):
        paged_caches(model, backend, 8)
    with pytest.raises(ValueError, match=r"num_slots: 4 given, but LlamaForCausalLM has no recurrent layer"):
        paged_caches(decoder("llama"), backend, 8, num_slots=4)
    caches = paged_caches(model, backend, 8, num_slots=4)
    assert caches.states.nbytes == 4 * 4 * (64 * 4 + 64 * 8)
    model.set_attn_implementation("attncore")
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=8)
    batch.add_request("a", [1])
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build({"a": 3})
    with pytest.raises(RuntimeError, match="this step has no group of states"), attncore_context(metadata, caches):
        pass
    with pytest.raises(ValueError, match="compile_layers: the model has recurrent layers"):
        compile_layers(model, caches)
    with pytest.raises(ValueError, match="capture_between_attention: the model has recurrent layers"):
        capture_between_attention(lambda: None, caches)


def test_layers_of_another_kind_are_refused():
    """A short convolution keeps a state, too, and takes another cache."""
    import transformers

    from attncore.integrations.transformers import attention_layers

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Lfm2Config(
        **shape, vocab_size=97, layer_types=["conv", "full_attention"], num_hidden_layers=2
    )
    with pytest.raises(ValueError, match="Lfm2ForCausalLM has layers of type conv"):
        attention_layers(transformers.Lfm2ForCausalLM(config).eval())


class Steps:
    """A hybrid model that runs what is built for one request."""

    def __init__(self, model):
        self.model, backend = model, select_for_model(model, block_size=8).create("cpu")
        self.caches = paged_caches(model, backend, 4, num_slots=3)
        groups = [KVCacheGroup("blocks", 8, num_blocks=4), StateGroup("states", num_slots=3)]
        self.batch = InputBatch(max_num_reqs=2, max_model_len=16, groups=groups)
        self.builder = MetadataBuilder(self.batch, backend, max_num_batched_tokens=8)
        model.set_attn_implementation("attncore")

    def add(self):
        self.batch.add_request("a", {"blocks": [1], "states": [1]})

    def run(self, *rows, **given):
        metadata = self.builder.last_metadata
        with torch.inference_mode(), attncore_context(metadata, self.caches):
            ids = torch.tensor(rows, dtype=torch.int64)
            positions = metadata.positions[None]
            return self.model(input_ids=ids, position_ids=positions, use_cache=False, **given).logits

    def states(self):
        """Copies of the request's states in each layer."""
        slots = self.caches.states._slots.values()
        return [state[1].clone() for one in slots for states in one.kinds.values() for state in states.values()]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(
    ("count", "rows", "more", "says"),
    [
        (1, [[3], [4]], {}, "input_ids: 2 rows found"),
        (1, [[]], {}, "input_ids: 0 tokens found; the step has 1"),
        (2, [[3]], {}, "input_ids: 1 token found; the step has 2"),
        (2, [[3, 4]], {"attention_mask": torch.tensor([[0, 1]])}, "attention_mask: a mask was given"),
    ],
    ids=["rows", "no tokens", "tokens", "mask"],
)
def test_a_forward_pass_that_is_refused_changes_no_state(name, count, rows, more, says):
    steps = Steps(hybrid(name))
    steps.add()
    steps.builder.build({"a": 3})
    steps.run([5, 6, 7])
    steps.builder.build({"a": count})
    before = steps.states()
    with pytest.raises(ValueError, match=f"^{says}"):
        steps.run(*rows, **more)
    assert all(map(torch.equal, before, steps.states()))
    steps.run([3, 4][:count])
    assert not any(map(torch.equal, before, steps.states()))


def test_states_of_a_forward_pass_that_failed_are_not_continued():
    """Its layer of attention refuses the mask, behind a recurrent one."""
    steps = Steps(hybrid("Bamba"))
    steps.add()
    steps.builder.build({"a": 3})
    expected = steps.run([5, 6, 7])
    steps.builder.build({"a": 1})
    with pytest.raises(ValueError, match=r"^attention_mask: a mask was given"):
        steps.run([3], attention_mask=torch.zeros((1, 1, 1, 1), dtype=torch.bool))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^metadata: a forward pass failed .* in slot 1; preempt"):
            steps.run([3])
    steps.batch.remove_request("a")
    steps.add()
    steps.builder.build({"a": 3})
    assert torch.equal(steps.run([5, 6, 7]), expected)
    steps.builder.build({"a": 1})
    steps.run([3])
