"""Prompts of latent models by keys and values of every head: their logits are those of transformers' own attention."""

import itertools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.latent_models import MODELS, latent_model  # noqa: E402
from integrations.models import decoder, greedy  # noqa: E402

from attncore import InputBatch, MetadataBuilder, NoBackendError  # noqa: E402
from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup  # noqa: E402
from attncore.integrations.transformers import (  # noqa: E402
    PlainPrefill,
    attention_layers,
    attncore_context,
    compile_layers,
    paged_caches,
    plain_prefill,
    select_for_model,
    use_latent_caches,
)

BLOCK, BLOCKS = 8, 96


def prompts(*lengths):
    generator = torch.Generator().manual_seed(0)
    return {row: torch.randint(0, 128, (length,), generator=generator).tolist() for row, length in enumerate(lengths)}


def of_eager(model, said):
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return {row: model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for row, ids in said.items()}


class Rows:
    """Requests with blocks of their own, and a model whose prompts run plainly wherever that saves a product."""

    def __init__(self, model, fields=None, **plain):
        self.model = model
        use_latent_caches(model)
        self.backend = select_for_model(model, block_size=BLOCK, **(fields or {})).create()
        self.plain = plain_prefill(model, **{"least_saved": 0, **plain})
        self.caches = paged_caches(model, self.backend, BLOCKS, plain_prefill=self.plain)
        self.batch = InputBatch(max_num_reqs=8, max_model_len=256, block_size=BLOCK)
        self.builder = MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=512)
        self.fresh = iter(range(1, BLOCKS))
        model.set_attn_implementation("attncore")

    def add(self, name, tokens):
        self.batch.add_request(name, [next(self.fresh) for _ in range(-(-tokens // BLOCK))])

    def run(self, metadata, ids, padding=0):
        """Logits of every token; with tokens of padding behind them, as engines have."""
        given = torch.tensor([[*ids, *[0] * padding]])
        positions = torch.cat((metadata.positions, metadata.positions.new_zeros(padding)))
        with torch.inference_mode(), attncore_context(metadata, self.caches):
            return self.model(input_ids=given, position_ids=positions[None], use_cache=False).logits[0]

    def __call__(self, tokens, padding=0):
        """Runs ``tokens`` of each request: the logits of each of its tokens, and how its prompts ran."""
        scheduled = {name: len(ids) for name, ids in tokens.items()}
        metadata = self.builder.build({**dict.fromkeys(self.batch.req_ids, 0), **scheduled})
        logits = self.run(metadata, itertools.chain.from_iterable(tokens[name] for name in metadata.req_ids), padding)
        counts = [scheduled[name] for name in metadata.req_ids]
        step = self.caches._plain.step(metadata)
        assert self.caches.runs_plainly(metadata) is (step is not None)
        return dict(zip(metadata.req_ids, logits[: sum(counts)].split(counts), strict=True)), step


STEPS = ({0: 4, 1: 30, 2: 40}, {0: 1, 1: 50, 2: 60, 3: 70}, {0: 1, 1: 1, 2: 40, 3: 50})
"""Tokens of each request: prompts without context, contexts beside none and a decode, two decodes beside contexts."""


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(("workspace", "chunks"), [(16384, [0, 1, 1]), (40, [0, 2, 6]), (1, [0, 5, 11])])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_eager(name, workspace, chunks, padding):
    model, said = latent_model(name), prompts(6, 81, 140, 120)
    expected = of_eager(model, said)
    rows, seen, found_chunks = Rows(model, workspace_tokens=workspace), dict.fromkeys(said, 0), []
    for row, ids in said.items():
        rows.add(row, len(ids))
    for part in STEPS:
        found, step = rows({row: said[row][seen[row] : seen[row] + count] for row, count in part.items()}, padding)
        for row, count in part.items():
            own = expected[row][seen[row] : seen[row] + count]
            torch.testing.assert_close(found[row], own, atol=3e-4, rtol=3e-4)
            seen[row] += count
        assert (step.decode_metadata is None) is (1 not in part.values())
        found_chunks.append(len(step.chunks))
    assert found_chunks == chunks


def test_each_call_finds_the_plan_of_its_own_step(monkeypatch):
    """A library may keep the plan of one step alone."""
    planned, calls = {}, []

    def checked(method):
        def call(self, query, key, value, kv_cache, metadata, *args, **given):
            calls.append(metadata)
            assert planned[self.backend] is metadata
            return method(self, query, key, value, kv_cache, metadata, *args, **given)

        return call

    rows = Rows(latent_model("deepseek_v3"), workspace_tokens=40)
    backends = rows.backend, rows.caches._plain._own, rows.caches._plain._across
    for backend in backends:
        monkeypatch.setattr(type(backend), "plan", lambda self, metadata: planned.update({self: metadata}))
    for name in ("forward", "forward_with_lse"):
        monkeypatch.setattr(type(rows.backend).impl_class, name, checked(getattr(type(rows.backend).impl_class, name)))
    for name, ids in prompts(6, 81, 140, 120).items():
        rows.add(name, len(ids))
    for part in STEPS:
        rows({name: [1] * count for name, count in part.items()})
    assert len(calls) == 2 * (1 + 4 + 8)  # of two layers: own tokens; with decodes and two chunks; and six


@pytest.mark.parametrize("fields", [{"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "float16"}], ids=str)
def test_rows_of_other_caches(fields):
    """What a cache holds of a context is rounded, and a layer's scale is taken out of it."""
    model, said = latent_model("deepseek_v3"), prompts(110)
    (expected,) = of_eager(model, said).values()
    use_latent_caches(model)
    fp8 = fields["kv_cache_dtype"].startswith("fp8")
    rows = Rows(model, {**fields, "features": {"kv_scales"} if fp8 else set()})
    if fp8:
        for impl in rows.caches.impls.values():
            impl.set_scales(0.125, 0.125)
    rows.add(0, 110)
    rows({0: said[0][:60]})
    found, step = rows({0: said[0][60:]})
    assert step.chunks
    differs = (found[0] - expected[60:]).abs().max()
    assert differs < (0.5 if fp8 else 5e-3) * expected.abs().max()
    absorbed = paged_caches(model, rows.backend, BLOCKS)
    for name, cache in rows.caches.items():
        absorbed[name].copy_(cache)
        absorbed.impls[name].set_scales(rows.caches.impls[name].k_scale, rows.caches.impls[name].v_scale)
    rows.batch.rollback_many({0: 50})
    rows.caches = absorbed
    metadata = rows.builder.build({0: 50})
    same = rows.run(metadata, said[0][60:])
    torch.testing.assert_close(found[0], same, atol=0.05 if fp8 else 2e-3, rtol=0.05 if fp8 else 2e-3)


def test_short_prompts_behind_contexts_stay_absorbed():
    """Of few tokens, projecting a context up takes more products than it saves; of none it never does."""
    rows = Rows(latent_model("deepseek_v2"))
    rows.add(0, 90)
    said = prompts(90)[0]
    for tokens, plainly in ((60, True), (5, False), (25, True)):
        _, step = rows({0: said[:tokens]})
        assert (step is not None) is plainly, tokens


def test_a_step_has_to_save_enough():
    model = latent_model("deepseek_v2")
    rows = Rows(model, least_saved=4 * (20 * 21 // 2) * 36)  # heads, pairs of query and key, products of each
    for name, tokens, plainly in ((0, 20, False), (1, 21, True)):
        rows.add(name, tokens)
        _, step = rows({name: prompts(tokens)[0]})
        assert (step is not None) is plainly
    assert not Rows(model, least_saved=1 << 40).caches.runs_plainly(rows.builder.build({0: 0, 1: 0}))


def test_steps_of_the_list_builder():
    """Prompts come first there, and have no table without chunks."""
    model, said = latent_model("deepseek_v3"), prompts(40, 20)
    expected = of_eager(model, said)
    rows = Rows(model)
    builder = CommonMetadataBuilder(BLOCK, chunked_prefill=True, backend=rows.backend)
    tables = [[1, 2, 3, 4, 5], [6, 7, 8]]
    first = [SequenceGroup(True, [Sequence(0, 10, 0, tables[0])]), SequenceGroup(True, [Sequence(1, 19, 0, tables[1])])]
    rows.run(builder.build(first), said[0][:10] + said[1][:19])
    second = [
        SequenceGroup(True, [Sequence(0, 30, 10, tables[0])]),
        SequenceGroup(False, [Sequence(1, 1, 19, tables[1])]),
    ]
    metadata = builder.build(second)
    found = rows.run(metadata, said[0][10:] + said[1][19:])
    assert len(rows.caches._plain.step(metadata).chunks) == 1
    torch.testing.assert_close(found, torch.cat((expected[0][10:], expected[1][19:])), atol=3e-4, rtol=3e-4)


def test_compiled_layers_stay_absorbed():
    model, said = latent_model("deepseek_v2", first_k_dense_replace=2), prompts(40)
    expected = of_eager(model, said)
    rows = Rows(model)
    compile_layers(model, rows.caches, backend="eager")
    rows.caches._plain.attend = None  # not called
    rows.add(0, 40)
    found, _ = rows({0: said[0]})
    torch.testing.assert_close(found[0], expected[0], atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_runs_prompts_plainly(name):
    """Chunks of prompts beside decodes, with preemption; the engine of a model without latent layers has none."""
    model, asked = latent_model(name), list(prompts(1, 120, 90, 60).values())
    expected = [greedy(model, prompt, 12) for prompt in asked]
    engine = Engine(model, num_blocks=32, max_num_batched_tokens=48, block_size=BLOCK, plain_prefill={"least_saved": 0})
    plain, chunks = engine.caches._plain, []
    made = plain._made
    plain._made = lambda metadata: chunks.append(made(metadata)) or chunks[-1]
    assert engine.complete(asked, 12) == expected
    assert engine.preemptions
    assert any(step.chunks for step in chunks)
    assert any(step.decode_metadata is not None for step in chunks)
    assert Engine(model, num_blocks=32).caches._plain is None
    with pytest.raises(ValueError, match="plain_prefill: not with compile"):
        Engine(model, num_blocks=32, plain_prefill=True, compile=True)
    with pytest.raises(ValueError, match="without latent caches"):
        Engine(decoder("llama"), num_blocks=32, plain_prefill=True)


def test_what_is_refused():
    model = latent_model("deepseek_v3")
    with pytest.raises(ValueError, match=r"without latent caches; call use_latent_caches"):
        plain_prefill(model)
    plain_caches = select_for_model(model, block_size=BLOCK).create()
    use_latent_caches(model)
    rows = Rows(model)
    with pytest.raises(ValueError, match="plain_prefill: given for layers without latent caches"):
        paged_caches(model, plain_caches, 8, plain_prefill=rows.plain)
    with pytest.raises(TypeError, match="plain_prefill: a Choice found"):
        paged_caches(model, rows.backend, 8, plain_prefill=rows.plain.choice)
    with pytest.raises(ValueError, match="workspace_tokens"):
        plain_prefill(model, workspace_tokens=0)
    with pytest.raises(ValueError, match="least_saved"):
        plain_prefill(model, least_saved=-1)
    with pytest.raises(NoBackendError, match="flashinfer"):
        plain_prefill(model, backend="flashinfer")
    other = latent_model("deepseek_v3", num_attention_heads=8, num_key_value_heads=8)
    use_latent_caches(other)
    of_other = select_for_model(other, block_size=BLOCK).create()
    with pytest.raises(ValueError, match=r"made for \(heads, size\) \(4, 24\), but these layers have \(8, 24\)"):
        paged_caches(other, of_other, 8, plain_prefill=rows.plain)
    for asked in ({"sliding_window": 8}, {"sinks": torch.zeros(4)}):
        with pytest.raises(ValueError, match=f"has {next(iter(asked))}; leave plain_prefill out"):
            plain_prefill(model, layers=tuple(replace(layer, **asked) for layer in attention_layers(model)))
    latent = attention_layers(model)
    model.model.layers[0].self_attn.v_head_dim = 40
    with pytest.raises(ValueError, match="of several sizes"):
        plain_prefill(model, layers=latent)
    assert isinstance(rows.plain, PlainPrefill)
