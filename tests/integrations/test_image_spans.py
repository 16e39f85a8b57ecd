"""Gemma 3 with images over paged caches: logits are those of transformers' own eager forward pass."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.captured_engine import graphs_on_cpu  # noqa: E402
from integrations.image_models import IMAGE, PLACES, eager, gemma3, images, prompt  # noqa: E402
from integrations.models import decoder  # noqa: E402

from attncore.builder import InputBatch, MetadataBuilder  # noqa: E402
from attncore.integrations.transformers import (  # noqa: E402
    attncore_context,
    image_spans,
    paged_caches,
    select_for_model,
)

PROMPTS = {
    "between": (prompt(3, None, 5, None, 4), 2),
    "at both ends": (prompt(None, 30, None), 2),
    "text": (prompt(40), 0),
    "one": (prompt(1, None), 1),
}
STEPS = [
    {"between": 3, "text": 20},
    {"between": 19, "at both ends": 49, "text": 1},
    {"between": 4, "one": 19, "text": 19},
    {"between": 1},
    {"between": 17, "at both ends": 17},
    {"between": 4},
]
"""Tokens of each prompt, step after step, that cut no image."""


class Runner:
    """Requests of prompts with images, run by a model over paged caches."""

    def __init__(self, model, **choice):
        self.model = model
        chosen = select_for_model(model, features={"bidirectional_spans"}, block_size=8, **choice)
        backend = chosen.create("cpu")
        self.caches = paged_caches(model, backend, 64)
        self.batch = InputBatch(max_num_reqs=8, max_model_len=128, block_size=8, num_blocks=64, spans=True)
        self.builder = MetadataBuilder(self.batch, backend, max_num_batched_tokens=128)
        model.set_attn_implementation({"text_config": "attncore", "vision_config": "eager"})
        self.prompts, self.pixels = {}, {}

    def add(self, name, tokens, pixels):
        first = 1 + 9 * len(self.prompts)
        self.prompts[name], self.pixels[name] = tokens, pixels
        self.batch.add_request(name, list(range(first, first + 9)))
        self.batch.set_spans(name, image_spans(self.model, tokens))

    @torch.no_grad()
    def step(self, scheduled):
        """The logits of each request's tokens of the step."""
        metadata = self.builder.build({**dict.fromkeys(self.batch, 0), **scheduled})
        ids, pixels, host = [], [], metadata.host
        for row, name in enumerate(metadata.req_ids):
            first, stop = int(host.context_lens[row]), int(host.seq_lens[row])
            ids += self.prompts[name][first:stop]
            spans = image_spans(self.model, self.prompts[name])
            pixels += [self.pixels[name][i] for i, (start, _) in enumerate(spans) if first <= start < stop]
        given = {"pixel_values": torch.stack(pixels)} if pixels else {}
        with attncore_context(metadata, self.caches):
            logits = self.model(
                input_ids=torch.tensor([ids]), position_ids=metadata.positions[None], use_cache=False, **given
            ).logits[0]
        starts = host.query_start_loc.tolist()
        return {name: logits[starts[row] : starts[row + 1]] for row, name in enumerate(metadata.req_ids)}


@pytest.mark.parametrize("window", [20, PLACES])
def test_logits_are_those_of_the_models_own_forward_pass(window):
    model = gemma3(window)
    runner, found = Runner(model, backend="reference"), {name: [] for name in PROMPTS}
    for seed, (name, (tokens, count)) in enumerate(PROMPTS.items()):
        runner.add(name, tokens, images(count, seed))
    for scheduled in STEPS:
        for name, logits in runner.step(scheduled).items():
            found[name].append(logits)
    for name, (tokens, _) in PROMPTS.items():
        wanted = eager(model, tokens, runner.pixels[name])
        torch.testing.assert_close(torch.cat(found[name]), wanted, atol=2e-5, rtol=2e-5)


def test_it_matters_that_images_see_themselves_both_ways():
    """What the test above would not see if the model's images were causal."""
    model, (tokens, count) = gemma3(), PROMPTS["between"]
    runner = Runner(model, backend="reference")
    runner.add("a", tokens, images(count))
    runner.batch.set_spans("a", [])
    found, wanted = runner.step({"a": len(tokens)})["a"], eager(model, tokens, images(count))
    same = (found - wanted).abs().amax(dim=1) < 1e-4
    assert same[:4].all()
    assert not same[4:].any()


def test_where_the_images_are():
    model = gemma3()
    assert image_spans(model, [1, 2]) == image_spans(model, []) == []
    assert image_spans(model, [1, IMAGE, IMAGE, 2, IMAGE]) == [(1, 3), (4, 5)]
    assert image_spans(model, torch.tensor(prompt(1, None, 0, None))) == [(2, 18), (20, 36)]


def test_what_has_no_such_images_is_refused():
    with pytest.raises(ValueError, match=r"^model: LlamaForCausalLM is of type llama; images that see themselves in"):
        image_spans(decoder("llama"), [1])
    with pytest.raises(ValueError, match=r"^tokens: the image at 2 has 16 tokens, more than the sliding window 15"):
        image_spans(gemma3(PLACES - 1), prompt(1, None))
    with pytest.raises(TypeError, match=r"^tokens, at index 1: "):
        image_spans(gemma3(), [1, "2"])
    with pytest.raises(TypeError, match=r"^model: "):
        image_spans(None, [1])


def said(model, tokens, pixels, count):
    """What the model says by its own eager forward passes, greedily."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(eager(model, tokens, pixels)[-1].argmax()))
    return tokens[-count:]


def new_engine(model, **options):
    few = {"num_blocks": 48, "max_num_reqs": 4, "max_num_batched_tokens": 24, "block_size": 8}
    return Engine(model, **{**few, "images": True, **options})


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("num_blocks", [48, 26])
def test_the_engine_says_what_the_model_says(num_blocks, captured, monkeypatch):
    """Prompts with images beside others, in steps of few tokens, so that chunks end ahead of images; with few blocks
    some run again. Decodes run in graphs, and with images nothing does."""
    model = gemma3()
    with graphs_on_cpu("auto", monkeypatch) as options:
        check_engine(model, num_blocks=num_blocks, **(options if captured else {"backend": "reference"}))


def check_engine(model, **options):
    wanted = [said(model, tokens, images(count, seed), 16) for seed, (tokens, count) in enumerate(PROMPTS.values())]
    engine = new_engine(model, **options)
    requests = [
        engine.add_request(tokens, 16, images=images(count, seed) if count else None)
        for seed, (tokens, count) in enumerate(PROMPTS.values())
    ]
    while engine.waiting or engine.running:
        engine.step()
    assert [request.output for request in requests] == wanted
    assert bool(engine.preemptions) == (engine.num_blocks < 48)
    assert bool(engine.graphs) == ("graph_sizes" in options)
    assert not engine.images
    assert engine.pool.num_free == engine.pool.num_blocks - 1


def test_prompts_with_other_images_share_no_blocks():
    model, (tokens, count) = gemma3(), PROMPTS["between"]
    engine = new_engine(model, backend="reference")
    for seed in range(3):
        request = engine.add_request(tokens, 6, images=images(count, seed))
        while engine.waiting or engine.running:
            engine.step()
        assert request.output == said(model, tokens, images(count, seed), 6)


def test_what_the_engine_refuses():
    model, (tokens, count) = gemma3(), PROMPTS["between"]
    few = {"num_blocks": 48, "max_num_reqs": 4, "block_size": 8, "backend": "reference"}
    with pytest.raises(ValueError, match=r"^images: the engine was made without; make it with images=True"):
        Engine(model, **few).add_request(tokens, 6, images=images(count))
    with pytest.raises(ValueError, match=r"^images: 1 given for 2 places in the prompt"):
        new_engine(model, backend="reference").add_request(tokens, 6, images=images(1))
    with pytest.raises(ValueError, match=r"^images: one has 16 tokens, and a step 15 \(max_num_batched_tokens\)"):
        Engine(model, **few, images=True, max_num_batched_tokens=15).add_request(tokens, 6, images=images(count))
