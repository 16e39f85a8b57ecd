"""examples/ranks.py with the keys of every request on two ranks: they say what one process says."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.models import decoder  # noqa: E402
from integrations.start_ranks import two_ranks  # noqa: E402
from integrations.two_ranks import NEW, POOL, PROMPTS  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")


def saved(tmp_path, name="llama"):
    model = decoder(name)
    model.save_pretrained(tmp_path)
    return model


@pytest.mark.parametrize(
    ("name", "compiler", "interleave"),
    [
        ("llama", "none", 1),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("llama", "none", 8), ("llama", "none", 2), ("llama", "eager", 1), ("mixtral", "none", 4))
        ),
    ],
)
def test_two_ranks_that_share_keys_say_what_one_says(tmp_path, name, compiler, interleave):
    model = saved(tmp_path, name)
    codes, said, found = two_ranks(tmp_path, compiler=compiler, interleave=interleave)
    assert codes == [0, 0], said
    assert found["output"] == Engine(model, **POOL).complete(PROMPTS, NEW)
    assert found["rows"] == model.model.layers[0].self_attn.q_proj.weight.shape[0]
    assert found["block_size"] == 2 * POOL["block_size"]
    assert found["preemptions"] == 0  # as many blocks hold twice the tokens


@pytest.mark.parametrize("gone", [0, 1])
def test_where_a_rank_ends_the_other_ends_with_a_sentence(tmp_path, gone):
    saved(tmp_path)
    codes, said, found = two_ranks(tmp_path, fault=str(gone), interleave=1)
    assert codes[gone] == 7
    assert codes[1 - gone] == 1, said
    last = said[1 - gone].strip().splitlines()[-1]
    assert last.startswith(f"rank {1 - gone}: ")
    assert "a rank failed or is gone" in last
    assert found is None


def test_a_layer_whose_keys_cannot_be_shared_out_is_named(tmp_path):
    saved(tmp_path, "mistral")
    codes, said, _ = two_ranks(tmp_path, interleave=1)
    assert codes == [1, 1]
    for one in said:
        assert "layer model.layers.0.self_attn: sliding_window: not with context parallelism" in one


def test_shared_keys_need_ranks():
    with pytest.raises(ValueError, match="process group has not been initialized"):
        Engine(decoder("llama"), interleave=1, **POOL)
