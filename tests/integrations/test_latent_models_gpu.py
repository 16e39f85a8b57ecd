"""On a CUDA device, in bfloat16: models with latent attention over latent caches, by each library that reads them."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from integrations.latent_models import MODELS, latent_model  # noqa: E402

from attncore import InputBatch, MetadataBuilder, NoBackendError  # noqa: E402
from attncore.graphs import capturing, new_graph  # noqa: E402
from attncore.integrations.transformers import (  # noqa: E402
    attncore_context,
    paged_caches,
    plain_prefill,
    select_for_model,
    use_latent_caches,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SHAPE = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,  # an expert that is chosen otherwise by rounding would hide what attention does
    "max_position_embeddings": 4096,
}
LENGTHS = (1, 17, 460, 700)
BLOCK = 64


def alone(model, prompts):
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        ids = [torch.tensor([one], device="cuda") for one in prompts]
        return torch.cat([model(input_ids=one, use_cache=False).logits[0, -1:] for one in ids]).float()


def served(model, prompts, backend, plain=None):
    """The logits of the last token of each prompt: most computed before, in chunks, the last as a captured decode."""
    caches = paged_caches(model, backend, 64, plain_prefill=plain)
    batch = InputBatch(max_num_reqs=4, max_model_len=1024, block_size=BLOCK, num_blocks=64)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=1024)
    blocks = itertools.count(1)
    for row, ids in enumerate(prompts):
        batch.add_request(row, [next(blocks) for _ in range(-(-len(ids) // BLOCK))])
    model.set_attn_implementation("attncore")
    seen = dict.fromkeys(range(len(prompts)), 0)

    def run(ids, metadata):
        with torch.inference_mode(), attncore_context(metadata, caches):
            return model(input_ids=ids, position_ids=metadata.positions[None], use_cache=False).logits[0]

    for part in (lambda n: n // 2, lambda n: n - 1 - n // 2):
        step = {row: part(len(ids)) for row, ids in enumerate(prompts)}
        metadata = builder.build(step)
        names = [row for row in metadata.req_ids if step[row]]
        tokens = [prompts[row][seen[row] : seen[row] + step[row]] for row in names]
        assert caches.runs_plainly(metadata) is (plain is not None)
        run(torch.tensor([list(itertools.chain.from_iterable(tokens))], device="cuda"), metadata)
        seen = {row: seen[row] + step[row] for row in seen}
    ids = torch.zeros(1, len(prompts), dtype=torch.int64, device="cuda")
    captured = builder.capture(len(prompts))
    run(ids, captured)
    torch.cuda.synchronize()
    graph = new_graph("cuda")
    with capturing(graph):
        captured.record()
        logits = run(ids, captured)
    metadata = builder.build(bucket=len(prompts))
    ids.copy_(torch.tensor([[prompts[row][-1] for row in metadata.req_ids]]))
    metadata.replay(graph)
    return logits[torch.tensor([metadata.req_ids.index(row) for row in range(len(prompts))], device="cuda")].float()


@pytest.mark.parametrize(
    ("absorbed", "plainly"),
    [("flashinfer", None), ("flashinfer", "flash"), ("flashinfer", "rocm"), ("flash", None), ("flash", "flash")],
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_as_right_as_those_of_eager(name, absorbed, plainly):
    """Absorbed, and with prompts by keys and values of every head over another backend, their contexts in chunks."""
    model = latent_model(name, **SHAPE).cuda()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 128, (length,), generator=generator).tolist() for length in LENGTHS]
    exact = alone(model, prompts)
    model = model.bfloat16()
    usual = (alone(model, prompts) - exact).abs().max()
    use_latent_caches(model)
    try:
        choice = select_for_model(model, backend=absorbed, block_size=BLOCK, cuda_graph="uniform_decode")
        asked = {"backend": plainly, "least_saved": 0, "workspace_tokens": 128}
        plain = None if plainly is None else plain_prefill(model, **asked)
    except NoBackendError as error:
        pytest.skip(str(error))
    found = (served(model, prompts, choice.create(), plain) - exact).abs().max()
    assert found <= 2 * usual, f"{found} from float32's, eager's in bfloat16 are {usual}"
