"""examples/engine.py: tokens as they come, prompts in words, torch's threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.models import decoder, greedy  # noqa: E402
from integrations.test_engine import is_empty, prompts  # noqa: E402

LIMITS = {"num_blocks": 40, "max_num_reqs": 4, "max_num_batched_tokens": 32, "block_size": 8}
END = 0
EXAMPLES = Path(__file__).parents[2] / "examples"
UTF8 = {**os.environ, "PYTHONIOENCODING": "utf-8"}


@pytest.fixture
def engine():
    return Engine(decoder("llama"), **LIMITS)


def byte_tokenizer(**special):
    """A token for every byte, and one for the end: most letters beyond ASCII take several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {"<end>": END} | {letter: 1 + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def fallback_tokenizer():
    """As of Llama 2: a letter that is no token is its bytes. All bytes in a row become letters, or none of them."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = ["<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *" abc"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def of_text(monkeypatch, said, tokenizer=None):
    """An engine whose model says ``said`` after every prompt, token by token."""
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    engine = Engine(decoder("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer, **LIMITS)
    tokens = [*tokenizer.encode(said), END, END]

    def forward(metadata):
        running = [engine.running.get(name) for name in metadata.req_ids]
        return torch.tensor([tokens[len(one.output)] if one else 0 for one in running])

    monkeypatch.setattr(engine, "_forward", forward)
    return engine


def test_tokens_come_step_by_step(engine):
    asked = prompts(6, 40)
    steps, step = [], engine.step
    engine.step = lambda: steps.append(0) or step()
    came = [(len(steps), number, token) for number, token in engine.generate(asked, 5)]
    for number, prompt in enumerate(asked):
        assert [token for _, of, token in came if of == number] == greedy(engine.model, prompt, 5)
        when = [at for at, of, _ in came if of == number]
        assert when == sorted(set(when))  # each as soon as its step has run
    assert is_empty(engine)


def test_who_stops_reading_cancels_the_rest_and_no_other(engine):
    asked = prompts(3, 20, seed=2)
    other = engine.add_request(asked[2], 6)
    stream = engine.generate(asked[:2], 6)
    next(stream)
    stream.close()
    assert [*engine.running.values(), *engine.waiting] == [other]
    while engine.running:
        engine.step()
    assert other.output == greedy(engine.model, asked[2], 6)
    assert is_empty(engine)


def test_two_streams_share_the_steps(engine):
    asked = prompts(2, 20, seed=3)
    one, two = (engine.generate([prompt], 6) for prompt in asked)
    together = [pair for pairs in zip(one, two, strict=True) for pair in pairs]
    assert [token for _, token in together[::2]] == greedy(engine.model, asked[0], 6)
    assert [token for _, token in together[1::2]] == greedy(engine.model, asked[1], 6)


def test_a_stream_is_refused_before_it_is_read(engine):
    with pytest.raises(ValueError, match="exceeds max_model_len"):
        engine.generate([[1], [1] * 500], 4)
    assert not engine.waiting


def test_a_stream_ends_where_its_request_was_cancelled(engine):
    stream = engine.generate([[1, 2]], 50)
    next(stream)
    engine.cancel(next(iter(engine.running.values())))
    assert list(stream) == []


def test_text_in_and_text_out_by_whole_letters(monkeypatch):
    engine = of_text(monkeypatch, " über 日本 🦊!")
    pieces = [piece for _, piece in engine.generate(["Grüße"], 40)]
    assert "".join(pieces) == " über 日本 🦊!"  # the end token ends it, and is not shown
    assert [len(piece) for piece in pieces] == [1] * len(pieces)
    ids = engine.tokenizer.encode("Grüße")
    text, tokens = engine.complete(["Grüße", ids], 40, stop=(END,))
    assert (text, tokens[-1]) == (" über 日本 🦊!", END)
    assert engine.complete(["a"], 2) == [" \ufffd"]  # cut inside a letter: that is all there is
    assert is_empty(engine)


@pytest.mark.parametrize("prompt", ["ab", "b 日本", "日本語"])
@pytest.mark.parametrize("said", [" 日本語aéé 🦊🦊b", "語é"])
def test_letters_that_are_bytes_in_a_row_are_told_once(monkeypatch, prompt, said):
    engine = of_text(monkeypatch, said, fallback_tokenizer())
    pieces = [piece for _, piece in engine.generate([prompt], 40)]
    assert pieces == list(said)
    request = engine.add_request(prompt, 40)
    while not request.finished:
        engine.step()
    assert request.news() == [said]  # read at once, as examples/serve.py does


def test_bytes_that_are_no_letter_are_told_with_what_follows(monkeypatch):
    tokenizer = fallback_tokenizer()
    engine = of_text(monkeypatch, "éa", tokenizer)
    known = [1 + byte for byte in "é".encode()]
    monkeypatch.setattr(engine, "_forward", lambda metadata: torch.tensor([tokens.pop(0)]))
    tokens = [*known, 1 + 0xE2, tokenizer.encode("a")[0], END, END]
    assert engine.complete(["b"], 40) == ["é\ufffd\ufffda"]  # bytes that the decoder has as three


def test_few_tokens_of_a_prompt_are_decoded(monkeypatch):
    """Also where each of its letters is the one that stands for bytes that are none."""
    engine = of_text(monkeypatch, "a", fallback_tokenizer())
    decoded, decode = [], engine.tokenizer.decode
    monkeypatch.setattr(
        type(engine.tokenizer), "decode", lambda self, ids, **kw: decoded.append(len(ids)) or decode(ids, **kw)
    )
    assert engine.complete(["\ufffd" * 12], 40) == ["a"]
    assert max(decoded) < 12


def test_text_without_a_tokenizer_is_refused(engine):
    with pytest.raises(TypeError, match=r"^prompt: text, and the engine has no tokenizer; "):
        engine.generate(["a"], 3)
    assert not engine.waiting


def test_one_text_is_no_list_of_them(engine):
    for ask in (engine.generate, engine.complete):
        with pytest.raises(TypeError, match=r"^prompts: one text; give a list"):
            ask("abc", 3)
    assert not engine.waiting


def test_the_example_continues_a_text_by_a_model_of_a_folder(tmp_path):
    decoder("llama", vocab_size=257).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    words = [sys.executable, str(EXAMPLES / "generate.py"), str(tmp_path), "Once", "upon"]
    ran = subprocess.run(words, capture_output=True, check=False, timeout=300, encoding="utf-8", env=UTF8)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Once upon")
    assert len(ran.stdout.strip()) > len("Once upon")


@pytest.mark.parametrize(
    ("words", "code"), [(["--help"], 0), (["no/such/model"], 2), (["/nosuch"], 2), (["--fast"], 2)]
)
def test_the_example_says_what_is_wrong_without_a_traceback(words, code):
    words = [sys.executable, str(EXAMPLES / "generate.py"), *words]
    environ = {**UTF8, "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(words, capture_output=True, check=False, timeout=300, encoding="utf-8", env=environ)
    assert ran.returncode == code
    assert "Traceback" not in ran.stderr
    assert max(map(len, ran.stdout.splitlines()), default=0) <= 80
    assert not code or ran.stderr.splitlines()[-1].startswith("generate.py: ")


@pytest.mark.parametrize("threads", [1, 3])
def test_torch_computes_with_the_engine_s_threads_and_only_meanwhile(monkeypatch, threads):
    before, seen = torch.get_num_threads(), set()
    engine = Engine(decoder("llama"), threads=threads, **LIMITS)
    forward = engine.model.forward

    def watched(*args, **kinds):
        seen.add(torch.get_num_threads())
        return forward(*args, **kinds)

    monkeypatch.setattr(engine.model, "forward", watched)
    for _ in engine.generate([[1, 2, 3]], 3):
        assert torch.get_num_threads() == before
    assert seen == {threads}
