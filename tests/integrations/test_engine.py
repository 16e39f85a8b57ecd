"""examples/engine.py: tokens are those of the model alone, whatever runs beside; blocks come back."""

import gc
import math
import random
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from block_pool import BlockPool  # noqa: E402
from engine import Engine  # noqa: E402
from integrations.models import DECODERS, DYNAMIC, SHAPE, decoder, encoder, greedy, phi3  # noqa: E402
from worker import default_graph_sizes  # noqa: E402


def prompts(count, longest, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(128) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def is_empty(engine):
    return (len(engine.batch), engine.pool.num_free, engine.running, engine.pool._holders) == (
        0,
        engine.pool.num_blocks - 1,
        {},
        {},
    )


@pytest.mark.parametrize("name", DECODERS)
def test_every_request_says_what_it_says_alone(name):
    model = decoder(name)
    asked = prompts(7, 60)
    expected = [greedy(model, prompt, 12) for prompt in asked]
    engine = Engine(model, num_blocks=24, max_num_reqs=4, max_num_batched_tokens=32, block_size=8)
    assert engine.complete(asked, 12) == expected
    assert is_empty(engine)


def test_a_model_of_text_and_images_runs_text():
    import transformers

    image = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**SHAPE, "sliding_window": 5}, vision_config={**image, "image_size": 28, "patch_size": 14}
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    asked = prompts(3, 40)
    engine = Engine(model, num_blocks=24, max_num_reqs=4, max_num_batched_tokens=32, block_size=8)
    assert engine.max_model_len == SHAPE["max_position_embeddings"]
    assert engine.complete(asked, 5) == [greedy(model, prompt, 5) for prompt in asked]


def test_tokens_are_those_of_generate_batch():
    """transformers' own continuous batching over the same requests."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = decoder("llama")
    asked = prompts(5, 40)
    engine = Engine(model, num_blocks=64, max_num_reqs=4, max_num_batched_tokens=64, block_size=16)
    ours = engine.complete(asked, 8)
    model.set_attn_implementation("sdpa")
    answers = model.generate_batch(
        inputs=asked,
        generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=64),
        warmup=False,
    )
    by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in answers.values()}
    assert ours == [by_prompt[tuple(prompt)] for prompt in asked]


def test_a_prefix_is_computed_once():
    model = decoder("llama")
    draw = random.Random(3)
    shared = [draw.randrange(128) for _ in range(48)]
    asked = [[*shared, 1, 2, 3], [*shared, 4, 5], shared]
    engine = Engine(model, num_blocks=40, max_num_reqs=4, max_num_batched_tokens=256, block_size=8)
    assert engine.complete(asked[:1], 5) == [greedy(model, asked[0], 5)]
    requests = [engine.add_request(prompt, 5) for prompt in asked[1:]]
    engine.step()
    assert [request.computed for request in requests] == [50, 48]
    assert requests[0].blocks[:6] == requests[1].blocks[:5] + requests[0].blocks[5:6]
    while engine.running:
        engine.step()
    assert [request.output for request in requests] == [greedy(model, prompt, 5) for prompt in asked[1:]]


def test_preempted_requests_say_the_same():
    model = decoder("mistral")
    asked = prompts(6, 30, seed=5)
    engine = Engine(model, num_blocks=13, max_num_reqs=6, max_num_batched_tokens=64, block_size=4)
    assert engine.complete(asked, 16) == [greedy(model, prompt, 16) for prompt in asked]
    assert engine.preemptions > 3
    assert is_empty(engine)


def test_stop_tokens_cancelled_requests_and_sampling():
    model = decoder("llama")
    engine = Engine(model, num_blocks=40, max_num_reqs=4, max_num_batched_tokens=64, block_size=8)
    prompt = prompts(1, 20)[0]
    said = greedy(model, prompt, 8)
    assert engine.complete([prompt], 8, stop=(said[3],))[0] == said[: said.index(said[3]) + 1]
    running, waiting = engine.add_request(prompt, 8), None
    engine.step()
    waiting = engine.add_request(prompt, 8)
    engine.cancel(waiting)
    engine.cancel(running)
    engine.cancel(running)
    assert engine.step() == []
    assert is_empty(engine)
    warm = Engine(model, num_blocks=40, max_num_reqs=4, max_num_batched_tokens=64, block_size=8, seed=1)
    outputs = {tuple(output) for output in warm.complete([prompt] * 8, 8, temperature=5.0)}
    assert len(outputs) > 4


def test_an_engine_says_what_it_takes_and_has():
    engine = Engine(decoder("llama"), num_blocks=10, block_size=8)
    assert repr(engine) == "<Engine of LlamaForCausalLM on cpu: 0 running, 0 waiting, 9 of 9 blocks free>"
    with pytest.raises(TypeError, match="model: a str found; give a loaded model of transformers"):
        Engine("llama")
    with pytest.raises(ValueError, match="num_blocks: 1 is below 2"):
        Engine(decoder("llama"), num_blocks=1)


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 4, "both must be at least 1"),
        ([1], 0, "both must be at least 1"),
        ([1] * 250, 10, "length 260 with max_new_tokens exceeds max_model_len 256"),
        ([1] * 100, 10, "length 110 needs more than the pool's blocks, 9"),
    ],
)
def test_requests_that_can_never_run_are_refused(prompt, new, message):
    engine = Engine(decoder("llama"), num_blocks=10, max_num_reqs=4, max_num_batched_tokens=64, block_size=8)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, new)
    assert is_empty(engine)


def test_an_argument_that_is_misspelt_is_guessed():
    with pytest.raises(TypeError, match=r"^num_block: Engine has no such argument; did you mean num_blocks\?$"):
        Engine(decoder("llama"), num_block=8)


@pytest.mark.parametrize(
    "wrong",
    [{"threads": True}, {"ahead": True}, {"ahead": 1.0}, {"max_model_len": 0}, {"max_model_len": True}]
    + [{name: 3} for name in ("num_heads", "num_kv_heads", "head_size", "sliding_window", "sinks")],
    ids=str,
)
def test_an_argument_that_is_wrong_is_named(wrong):
    (name,) = wrong
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        Engine(decoder("llama"), num_blocks=10, max_num_reqs=4, max_num_batched_tokens=64, block_size=8, **wrong)


def test_default_graph_sizes_are_no_larger_than_a_step():
    assert default_graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert default_graph_sizes(3) == (1, 2, 3)
    assert default_graph_sizes(1) == (1,)


def test_a_request_of_another_engine_is_not_cancelled():
    one, other = (Engine(decoder("llama"), num_blocks=40, max_num_reqs=4, block_size=8) for _ in range(2))
    own, strange = one.add_request([1, 2], 4), other.add_request([3], 4)
    one.step()
    assert own.id == strange.id
    one.cancel(strange)
    assert list(one.running.values()) == [own]


def test_token_ids_in_place_of_prompts_are_told():
    engine = Engine(decoder("llama"), num_blocks=10, max_num_reqs=4, max_num_batched_tokens=64, block_size=8)
    with pytest.raises(TypeError, match=r"^prompts: the token ids of one prompt; give a list of prompts"):
        engine.complete([1, 2, 3], 4)
    assert not engine.waiting


def test_no_prompt_is_queued_where_one_can_never_run():
    engine = Engine(decoder("llama"), num_blocks=10, max_num_reqs=4, max_num_batched_tokens=64, block_size=8)
    with pytest.raises(ValueError, match="length 504 with max_new_tokens exceeds max_model_len 256"):
        engine.complete([[1, 2], [1] * 500], 4)
    assert not engine.waiting
    assert engine.complete([[1, 2]], 4) == [greedy(engine.model, [1, 2], 4)]


def test_an_engine_is_no_longer_than_its_model_and_serves_no_encoder():
    with pytest.raises(ValueError, match="max_model_len: 257 given; the model has 256 positions"):
        Engine(decoder("llama"), num_blocks=40, max_model_len=257)
    with pytest.raises(ValueError, match="model: BertModel is an encoder and says no next token"):
        Engine(encoder(), num_blocks=40)


def test_rope_types_run_where_their_frequencies_stand_still():
    short = phi3()
    short.config.max_position_embeddings = 32
    still = decoder("llama", rope_parameters=DYNAMIC)
    still.model.rotary_emb.rope_type = "default"
    for model, longest in ((short, 20), (still, 60)):
        asked = prompts(6, longest)
        engine = Engine(model, num_blocks=40, max_num_reqs=4, max_num_batched_tokens=64, block_size=8)
        assert engine.complete(asked, 8) == [greedy(model, prompt, 8) for prompt in asked]


def test_close_gives_the_caches_back_at_once():
    engine = Engine(decoder("llama"), num_blocks=10, max_num_reqs=4, max_num_batched_tokens=64, block_size=8)
    engine.complete([[1, 2, 3]], 4)
    caches = [weakref.ref(cache) for cache in engine.caches.values()]
    gc.disable()
    try:
        engine.close()
        assert [cache() for cache in caches] == [None, None]
    finally:
        gc.enable()
    engine.close()


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_a_temperature_that_is_none_is_refused(temperature):
    engine = Engine(decoder("llama"), num_blocks=10, max_num_reqs=4, max_num_batched_tokens=64, block_size=8)
    with pytest.raises(ValueError, match="temperature: "):
        engine.add_request([1], 1, temperature=temperature)
    assert is_empty(engine)


def soak(num_requests, sample, seed=0, **options):
    """Requests that come in bursts, share prefixes, are cancelled and preempted; a sample is run again alone."""
    draw, model = random.Random(seed), decoder("llama", num_hidden_layers=1)
    engine = Engine(model, num_blocks=40, max_num_reqs=12, max_num_batched_tokens=48, block_size=4, **options)
    prefixes, asked, live, finished, cancelled = prompts(5, 24, seed=9), 0, [], [], 0
    while asked < num_requests or engine.running or engine.waiting:
        while asked < num_requests and len(live) < 16 and draw.random() < 0.7:
            head = draw.choice(prefixes) if draw.random() < 0.6 else []
            tail = [draw.randrange(128) for _ in range(draw.randint(1, 20))]
            live.append(engine.add_request([*head, *tail], draw.randint(1, 12)))
            asked += 1
        for request in engine.step():
            live.remove(request)
            finished.append(request)
        if live and draw.random() < 0.05:
            engine.cancel(live.pop(draw.randrange(len(live))))
            cancelled += 1
    assert is_empty(engine)
    assert len(finished) + cancelled == num_requests
    for request in draw.sample(finished, sample):
        assert request.output == greedy(model, request.tokens[: request.num_prompt], request.max_new_tokens)
    return cancelled, engine.preemptions


def test_a_soak_of_two_thousand_requests():
    cancelled, preemptions = soak(2000, 50)
    assert cancelled > 50
    assert preemptions > 50


def test_a_pool_evicts_what_was_free_the_longest():
    pool = BlockPool(5)
    first, second = pool.take(2), pool.take(2)
    assert pool.take(1) is None
    for blocks, key in ((first, "a"), (second, "b")):
        for block in blocks:
            pool.publish(block, (key, block))
    pool.give_back(second)
    pool.give_back(first)
    assert pool.share(("b", second[1])) == second[1]
    assert pool.take(1) == [second[0]]
    assert pool.share(("b", second[0])) is None
    assert pool.share(("a", first[0])) == first[0]
    assert pool.num_free == 1
