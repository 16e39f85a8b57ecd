"""Models with latent attention (MLA) over latent caches: their output is that of transformers' own attention."""

import itertools
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.captured_engine import graphs_on_cpu  # noqa: E402
from integrations.latent_models import MODELS, SHAPE, latent_model  # noqa: E402
from integrations.models import decoder, greedy  # noqa: E402

from attncore import InputBatch, MetadataBuilder  # noqa: E402
from attncore.integrations.transformers import (  # noqa: E402
    attention_layers,
    attncore_context,
    compile_layers,
    paged_caches,
    select_for_model,
    use_latent_caches,
)

BLOCK = 8
ROW = SHAPE["kv_lora_rank"] + SHAPE["qk_rope_head_dim"]


class Rows:
    """Requests with blocks of their own, and a model whose layers attend over latent caches."""

    def __init__(self, model, **fields):
        self.model = model
        use_latent_caches(model)
        self.backend = select_for_model(model, block_size=BLOCK, **fields).create()
        self.caches = paged_caches(model, self.backend, 64)
        self.batch = InputBatch(max_num_reqs=8, max_model_len=256, block_size=BLOCK)
        self.builder = MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=512)
        self.fresh = iter(range(1, 64))

    def add(self, name, tokens):
        self.batch.add_request(name, [next(self.fresh) for _ in range(-(-tokens // BLOCK))])

    def __call__(self, tokens):
        """Runs ``tokens`` of each request; the logits of each of its tokens."""
        scheduled = {name: len(ids) for name, ids in tokens.items()}
        metadata = self.builder.build({**dict.fromkeys(self.batch.req_ids, 0), **scheduled})
        ids = torch.tensor([list(itertools.chain.from_iterable(tokens[name] for name in metadata.req_ids))])
        self.model.set_attn_implementation("attncore")
        with torch.inference_mode(), attncore_context(metadata, self.caches):
            logits = self.model(input_ids=ids, position_ids=metadata.positions[None], use_cache=False).logits[0]
        return dict(zip(metadata.req_ids, logits.split([scheduled[name] for name in metadata.req_ids]), strict=True))


def prompts(*lengths):
    generator = torch.Generator().manual_seed(0)
    return {row: torch.randint(0, 128, (length,), generator=generator).tolist() for row, length in enumerate(lengths)}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_eager(name):
    """Chunks of prompts beside decodes, and each token's logits."""
    model, said = latent_model(name), prompts(5, 23, 40)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = {row: model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for row, ids in said.items()}
    rows, seen = Rows(model), dict.fromkeys(said, 0)
    for row, ids in said.items():
        rows.add(row, len(ids))
    for part in ({0: 4, 1: 9, 2: 17}, {0: 1, 1: 13, 2: 1}, {1: 1, 2: 22}):
        found = rows({row: said[row][seen[row] : seen[row] + count] for row, count in part.items()})
        for row, count in part.items():
            own = expected[row][seen[row] : seen[row] + count]
            torch.testing.assert_close(found[row], own, atol=2e-4, rtol=2e-4)
            seen[row] += count
    assert seen == {row: len(ids) for row, ids in said.items()}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_eager_generate(name):
    model, asked = latent_model(name), prompts(1, 9, 30)
    rows, said = Rows(model), {row: [] for row in asked}
    for row, prompt in asked.items():
        rows.add(row, len(prompt) + 8)
    logits = rows(asked)
    for _ in range(8):
        step = {row: [int(logits[row][-1].argmax())] for row in asked}
        for row, token in step.items():
            said[row] += token
        logits = rows(step)
    assert said == {row: greedy(model, prompt, 8) for row, prompt in asked.items()}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_runs_them_over_latent_caches(name, captured, monkeypatch):
    """With chunks, preemption and, by stand-ins for graphs, padded steps of decodes."""
    model, asked = latent_model(name), list(prompts(1, 40, 9, 30).values())
    expected = [greedy(model, prompt, 12) for prompt in asked]
    with graphs_on_cpu("auto", monkeypatch) if captured else nullcontext({}) as options:
        engine = Engine(model, num_blocks=12, max_num_batched_tokens=16, block_size=BLOCK, **options)
        assert {cache.shape[1:] for cache in engine.caches.values()} == {(BLOCK, ROW)}
        assert engine.complete(asked, 12) == expected
        assert (bool(engine.graphs), engine.pool.num_free) == (captured, 11)
        assert engine.preemptions


def test_layers_ask_for_a_latent_cache():
    model = latent_model("deepseek_v3")
    (plain, _), count = attention_layers(model), use_latent_caches(model)
    assert (count, plain.num_kv_heads, plain.head_size, plain.head_size_v, plain.use_mla) == (2, 4, 24, 12, False)
    latent, _ = attention_layers(model)
    assert (latent.num_heads, latent.num_kv_heads, latent.head_size, latent.head_size_v) == (4, 1, ROW, 32)
    assert latent.use_mla
    assert latent.scale == plain.scale
    expand = model.model.layers[0].self_attn.expand_kv
    assert use_latent_caches(model) == 2
    assert model.model.layers[0].self_attn.expand_kv is expand, "a second call changes nothing"


def test_a_cache_holds_one_row_a_token():
    rows = Rows(latent_model("deepseek_v2"))
    assert {cache.shape for cache in rows.caches.values()} == {(64, BLOCK, ROW)}
    assert rows.backend.config.use_mla


def test_outside_of_attncores_attention_the_model_runs_as_before():
    model, ids = latent_model("deepseek_v3"), torch.tensor(list(prompts(12).values()))
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            before = model(input_ids=ids, use_cache=False).logits
            use_latent_caches(model)
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_compiled_layers_absorb():
    model, said = latent_model("deepseek_v2", first_k_dense_replace=2), prompts(9)
    rows = Rows(model)
    rows.add(0, 9)
    rows.model.set_attn_implementation("attncore")
    compile_layers(model, rows.caches, backend="eager")
    found = torch.cat([rows({0: said[0][:6]})[0], rows({0: said[0][6:]})[0]])
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([said[0]]), use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda module: setattr(module.kv_b_proj, "bias", torch.nn.Parameter(torch.zeros(112))),
            "kv_b_proj has a bias",
        ),
        (lambda module: setattr(module, "kv_b_proj", torch.nn.Identity()), "kv_b_proj, a Identity, has no matrix"),
        (lambda module: setattr(module, "v_head_dim", 13), "kv_b_proj has a weight"),
    ],
    ids=["bias", "no weight", "another shape"],
)
def test_what_cannot_be_absorbed_is_refused(change, says):
    model = latent_model("deepseek_v2")
    change(model.model.layers[1].self_attn)
    with pytest.raises(ValueError, match=rf"^layer model\.layers\.1\.self_attn: {says}"):
        use_latent_caches(model)
    assert not hasattr(model.model.layers[0].self_attn, "_attncore_latent"), "no layer was changed"


class Quantised(torch.nn.Linear):
    """As transformers keeps fp8 weights: with a scale beside them."""

    def forward(self, rows):
        return torch.nn.functional.linear(rows, self.weight.to(rows.dtype) * self.scale)


class Packed(torch.nn.Linear):
    def forward(self, rows):
        raise NotImplementedError("packed_mm: no kernel for float rows\nmore of it")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Quantised, "kv_b_proj, a Quantised, has no matrix of floats of two bytes or more"),
        (Packed, "kv_b_proj, a Packed, may compute more than the product with its weight"),
    ],
)
def test_quantised_weights_are_refused_and_an_engine_has_plain_caches(kind, says):
    model, prompt = latent_model("deepseek_v3"), [3, 4, 5]
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        projection.__class__ = kind
        if kind is Quantised:
            projection.scale = projection.weight.data.abs().max() / 448
            weight = (projection.weight.data / projection.scale).to(torch.float8_e4m3fn)
            projection.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=rf"^layer model\.layers\.0\.self_attn: {says}"):
        use_latent_caches(model)
    if kind is Packed:
        return
    engine = Engine(model, num_blocks=12, block_size=BLOCK)
    assert not engine.backend.config.use_mla
    assert engine.complete([prompt], 4) == [greedy(model, prompt, 4)]


class Adapted(torch.nn.Module):
    """As an adapter's layer is: ``weight`` and ``bias`` are those of the layer in it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.more = layer, torch.nn.Linear(layer.in_features, layer.out_features)
        with torch.no_grad():  # a small part, beside rows that are large
            self.more.weight *= 0.03
            self.more.bias.zero_()
            layer.weight[:3] *= 1e4

    weight = property(lambda self: self.layer.weight)
    bias = property(lambda self: self.layer.bias)

    def forward(self, rows):
        return self.layer(rows) + self.more(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["adapter", "hook"])
def test_what_is_computed_beside_the_weight_is_refused(what, dtype):
    model = latent_model("deepseek_v3", dtype=dtype)
    layer = model.model.layers[1].self_attn
    use_latent_caches(model)
    backend = select_for_model(model, block_size=BLOCK).create()
    paged_caches(model, backend, 4)
    if what == "adapter":
        layer.kv_b_proj = Adapted(layer.kv_b_proj).to(dtype)
    else:
        layer.kv_b_proj.register_forward_hook(lambda module, given, found: found * 2)
    for look in (use_latent_caches, lambda model: paged_caches(model, backend, 4)):
        with pytest.raises(ValueError, match=r"^layer model\.layers\.1\.self_attn: kv_b_proj, a \w+, may compute more"):
            look(model)


def test_a_model_without_latent_attention_is_refused():
    with pytest.raises(ValueError, match=r"^model: LlamaForCausalLM has no layer of latent attention"):
        use_latent_caches(decoder("llama"))
