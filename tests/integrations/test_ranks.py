"""examples/ranks.py: two processes say what one says; where one ends, the other does, with a sentence."""

import pickle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers  # noqa: E402
from engine import Engine  # noqa: E402
from integrations.models import decoder  # noqa: E402
from integrations.start_ranks import two_ranks  # noqa: E402
from integrations.two_ranks import NEW, POOL, PROMPTS  # noqa: E402
from ranks import FIRST, Messages, refuse_unshardable  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")


def saved(tmp_path, name="llama", **shape):
    model = decoder(name, **shape)
    model.save_pretrained(tmp_path)
    return model


@pytest.mark.parametrize(
    ("name", "compiler"),
    [
        ("llama", "none"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("llama", "eager"), ("gemma2", "none"))),
    ],
)
def test_two_ranks_say_what_one_says(tmp_path, name, compiler):
    model = saved(tmp_path, name)
    codes, said, found = two_ranks(tmp_path, compiler=compiler)
    assert codes == [0, 0], said
    assert found["graphs"] == (0 if compiler == "none" else 2)
    assert found["output"] == Engine(model, **POOL).complete(PROMPTS, NEW)
    assert found["rows"] == model.model.layers[0].self_attn.q_proj.weight.shape[0] // 2
    assert found["decode"] == FIRST  # one part, most of it padding
    assert found["nbytes"] < 2 * FIRST * found["messages"]


@pytest.mark.parametrize("gone", [0, 1])
def test_where_a_rank_ends_the_other_ends_with_a_sentence(tmp_path, gone):
    saved(tmp_path)
    codes, said, found = two_ranks(tmp_path, fault=str(gone))
    assert codes[gone] == 7
    assert codes[1 - gone] == 1, said
    last = said[1 - gone].strip().splitlines()[-1]
    assert last.startswith(f"rank {1 - gone}: ")
    assert "a rank failed or is gone" in last
    assert found is None


def test_what_cannot_be_shared_out_is_named(tmp_path):
    config = decoder("llama", num_attention_heads=4, num_key_value_heads=1).config
    with pytest.raises(
        ValueError, match=r"layer layers\.\*\.self_attn\.k_proj: 2 ranks do not divide the number of its key heads, 1"
    ):
        refuse_unshardable(config, 2)
    with pytest.raises(
        ValueError, match=r"layer layers\.\*\.self_attn\.q_proj: 3 ranks do not divide the number of its query heads, 4"
    ):
        refuse_unshardable(config, 3)
    with pytest.raises(ValueError, match=r"transformers has no tp_plan for gpt2, so that none of its layers"):
        refuse_unshardable(transformers.GPT2Config(), 2)
    refuse_unshardable(decoder("llama").config, 2)


def nbytes(*calls):
    """Of a message, whatever of it is sent at once."""
    return 8 + sum(len(pickle.dumps(call)) for call in calls)


def test_messages_are_as_long_as_the_documentation_says():
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    run = ("_run_steps", {}, 64, 1)
    prompt = ("_add", 3, [31000 + token for token in range(600)], list(range(1000, 1038)), 0, 0.0, 5)
    for what, size in (
        ("a step of decodes", nbytes(run)),
        ("gets a block", nbytes(("_append", {row: [1000 + row] for row in range(64)}), run)),
        ("that comes", nbytes(prompt, ("_run_steps", {3: 600}, None, 1))),
    ):
        assert f"{what} | {size:,}, " in text


def test_messages_of_any_length_arrive(monkeypatch):
    sent = []
    one = object.__new__(Messages)
    one.count = one.nbytes = 0
    for count in (0, 1, 30, 60, 200):
        calls = [("_append", {3: list(range(count))}), ("_run_steps", {}, None, 1)]
        monkeypatch.setattr(one, "_broadcast", lambda data: sent.append(data.clone()) or data)
        one.send([pickle.dumps(call) for call in calls])
        monkeypatch.setattr(one, "_broadcast", lambda data: data.copy_(sent.pop(0)))
        assert one.receive() == calls
    assert sent == []
    assert one.count == 5
