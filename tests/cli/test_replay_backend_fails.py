"""A backend that raises, or returns what the contract does not allow: one line names it, whatever it raises."""

import json

import pytest

pytest.importorskip("torch")

from cli.failing_backend import CALLS, planter, replayed

RAISED = {
    "a long text": (r"raise RuntimeError('\x1b[31m' + 'y' * 3_000_000)", r"RuntimeError: \x1b[31myyy"),
    "a text that raises": ("raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})", "E: without a message"),
    "KeyError": ("raise KeyError('k')", "KeyError: 'k'"),
    "AssertionError": ("assert False", "AssertionError: "),
    "a BaseException": ("raise type('Odd', (BaseException,), {})('odd')", "Odd: odd"),
    "GeneratorExit": ("raise GeneratorExit", "GeneratorExit: "),
    "StopIteration": ("raise StopIteration", "StopIteration: "),
    "SystemExit": ("raise SystemExit(0)", "SystemExit: 0"),
    "a group": ("raise BaseExceptionGroup('many', [KeyboardInterrupt()])", "BaseExceptionGroup: many"),
    "ValueError": ("raise ValueError('bad stride')", "ValueError: bad stride"),
    "the name of no argument": ("raise ValueError('trace: bad')", "ValueError: trace: bad"),
    "TypeError": ("raise TypeError('query: no')", "TypeError: query: no"),
    "a missing file": ("open('/nope')", "FileNotFoundError: "),
    "a closed pipe": ("raise BrokenPipeError", "BrokenPipeError: "),
    "a full disk": ("raise OSError(28, 'No space left on device')", "OSError: [Errno 28]"),
    "no backend": ("raise attncore.NoBackendError('none')", "NoBackendError: none"),
    "a missing module": ("import torch.absent", "ModuleNotFoundError: "),
    "a RuntimeError": ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
}


@pytest.fixture
def acme(site):
    """Plants the backend ``acme`` whose methods begin with the statements given."""
    return planter(site)


@pytest.mark.parametrize("where", ["init", "impl", "plan", "allocate", "forward"])
@pytest.mark.parametrize("how", RAISED)
def test_what_a_backend_raises_names_it(how, where, acme, trace, tmp_path, capsys):
    statement, words = RAISED[how]
    acme(**{where: statement})
    steps = tmp_path / "steps.jsonl"
    code, out, err = replayed(capsys, trace, "--save-steps", str(steps), "--json")
    assert (code, out, err.count("\n")) == (1, "", 1), err
    call = CALLS.get(where, where)
    assert err.startswith(f"attncore: error: backend acme (attn-acme 1.0) failed in {call}: {words}")
    assert len(err) < 1300
    assert "\x1b" not in err
    assert not [path for path in tmp_path.iterdir() if "steps" in path.name]


@pytest.mark.parametrize("where", ["init", "impl", "plan", "allocate", "forward"])
def test_an_interrupt_stays_one(where, acme, trace, capsys):
    acme(**{where: "raise KeyboardInterrupt"})
    assert replayed(capsys, trace) == (130, "", "attncore: error: interrupted\n")


@pytest.mark.parametrize("where", ["forward", "plan", "init"])
def test_a_memory_error_is_the_backends(where, acme, trace, capsys):
    acme(**{where: "raise MemoryError"})
    code, _, err = replayed(capsys, trace)
    assert code == 1
    assert f"failed in {CALLS.get(where, where)}: MemoryError: " in err


@pytest.mark.parametrize(
    ("where", "statement", "words"),
    [
        ("forward", "return None", "forward of layer 'layers.0' returned None; the contract says a tensor ("),
        ("forward", "return 3", "returned a value of type int; the contract says a tensor ("),
        ("forward", "return query[1:]", "returned a tensor (512, 4, 64) of torch.float32 on cpu; the contract says a "),
        ("forward", "return query.double()", "of torch.float64 on cpu; the contract says a tensor (513, 4, 64)"),
        ("forward", "return query.to('meta')", "of torch.float32 on meta; the contract says a tensor ("),
        ("impl", "return None", "impl returned None; the contract says an AttentionImpl"),
        ("allocate", "return None", "allocate_kv_cache returned None; the contract says one layer's cache"),
        ("from_host", "return None", "from_host returned None; the contract says a tensor"),
        ("init", "del self.config", "AttributeError: "),
        ("init", "self.config = 3", "its creation left name or config as the contract does not say"),
        ("init", "type(self).spec = {'a': 1}", "its creation left a value of type dict as its spec; AttentionBackend"),
    ],
)
def test_a_wrong_result_is_named(where, statement, words, acme, trace, capsys):
    acme(**{where: statement})
    code, out, err = replayed(capsys, trace)
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert err.startswith("attncore: error: backend acme (attn-acme 1.0)")
    assert words in err


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("return query", "forward_with_lse of layer 'layers.0' returned a tensor ("),
        ("return query, query", "returned a log-sum-exp, a tensor (513, 4, 64)"),
        ("raise KeyError(1)", "failed in forward_with_lse of layer 'layers.0': KeyError: 1"),
    ],
)
def test_a_wrong_log_sum_exp_is_named(statement, words, acme, trace, capsys):
    acme(lse=statement)
    code, _, err = replayed(capsys, trace, "--context-parallel", "2")
    assert (code, err.count("\n")) == (1, 1), err
    assert words in err


PLAIN = "; the contract says a tensor (513, 4, 64) of torch.float32 on cpu, plain and strided"
NOT_PLAIN = {
    "sparse": ("return {0}.to_sparse()", "a tensor of layout torch.sparse_coo" + PLAIN),
    "mkldnn": ("return {0}.to_mkldnn()", "a tensor of layout torch._mkldnn" + PLAIN),
    "of no memory": (
        "found = {0}.clone(); found.untyped_storage().resize_(0); return found",
        "a tensor of shape (513, 4, 64), which reaches beyond its memory" + PLAIN,
    ),
    "fake": (
        "from torch._subclasses import FakeTensorMode; return FakeTensorMode().from_tensor({0})",
        "a tensor of type FakeTensor" + PLAIN,
    ),
}


@pytest.mark.parametrize("how", NOT_PLAIN)
def test_a_tensor_that_is_not_plain_is_named(how, acme, trace, capsys):
    """Of the right shape, dtype and device, yet no operator of the check can read it."""
    statement, words = NOT_PLAIN[how]
    acme(forward=statement.format("query"))
    code, out, err = replayed(capsys, trace, "--head-size", "64")
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert f"forward of layer 'layers.0' returned {words}" in err


@pytest.mark.parametrize("how", NOT_PLAIN)
@pytest.mark.parametrize("part", ["query", "lse"])
def test_partial_results_that_are_not_plain_are_named(how, part, acme, trace, capsys):
    statement, words = NOT_PLAIN[how]
    body = statement.format("both[part]").replace("return ", "both[part] = ")
    number = 0 if part == "query" else 1
    acme(lse=f"both, part = [query, torch.zeros(query.shape[:2])], {number}; {body}; return tuple(both)")
    code, out, err = replayed(capsys, trace, "--head-size", "64", "--context-parallel", "2")
    assert (code, out, err.count("\n")) == (1, "", 1), err
    words = words if part == "query" else words.replace("(513, 4, 64)", "(513, 4)")
    assert f"forward_with_lse of layer 'layers.0' returned {'a log-sum-exp, ' if number else ''}{words}" in err


@pytest.mark.parametrize("shape", ["(2**60,)", "(2 * n, 2**60, 2)", "(n, 2**50 + n, 2)"])
def test_a_cache_of_another_shape_is_the_backends_fault(shape, acme, trace, capsys):
    acme(shape=shape)
    code, out, err = replayed(capsys, trace, "--head-size", "64")
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert "backend acme (attn-acme 1.0): allocate_kv_cache does not fit in memory: kv_cache_shape is (" in err
    assert "for 100 blocks; the contract says that exactly one axis grows with num_blocks" in err


def llama(folder):
    """The file of a model's configuration."""
    config = folder / "model.json"
    facts = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1}
    facts |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 128, "max_position_embeddings": 2048}
    config.write_text(json.dumps(facts))
    return str(config)


LATE = """
def late(self, readings=[0]):
    readings[0] += 1
    if readings[0] >= {reading}:
        raise KeyError("late")
    return self.__dict__[{name!r}] if {name!r} in self.__dict__ else getattr(super(Backend, self), {name!r})

Backend.{name} = property(late, lambda self, value: self.__dict__.update({name}=value))
"""


def add(site, statements):
    heavy = site.folder / "attn_acme_heavy.py"
    heavy.write_text(heavy.read_text() + statements)


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        *((name, reading) for name in ("config", "spec", "has_plan") for reading in (1, 2, 3)),
        *(("name", reading) for reading in (1, 2)),
        *((name, 1) for name in ("plan", "impl", "from_host", "kv_cache_shape", "allocate_kv_cache")),
    ],
)
@pytest.mark.parametrize("words", [(), ("--model", "MODEL")], ids=["layers", "model"])
def test_a_property_that_raises_is_named(name, reading, words, acme, site, trace, tmp_path, capsys):
    """Of the class, at any of its readings: many places read attributes of a backend, outside of its methods."""
    acme()
    add(site, LATE.format(name=name, reading=reading))
    if words:
        pytest.importorskip("transformers")
        words = ("--model", llama(tmp_path))
    code, out, err = replayed(capsys, trace, *words)
    assert (code, out) == (1, ""), err
    assert err.splitlines()[-1].startswith("attncore: error: backend acme (attn-acme 1.0) failed in ")
    assert err.endswith(": KeyError: 'late'\n")


@pytest.mark.parametrize(
    ("method", "body", "words"),
    [
        ("Impl.forward", "None", "forward of layer 'layers.0' returned None; the contract says a tensor ("),
        ("Impl.forward", "1 / 0", "failed in forward of layer 'layers.0': ZeroDivisionError: "),
        ("Backend.impl", "None", "impl returned None; the contract says an AttentionImpl"),
        ("Backend.from_host", "None", "from_host returned None; the contract says a tensor"),
        ("Backend.plan", "1 / 0", "failed in plan: ZeroDivisionError: "),
        ("Backend.allocate_kv_cache", "None", "allocate_kv_cache returned None; the contract says one layer's cache"),
    ],
)
def test_a_method_that_a_property_gives_is_guarded(method, body, words, acme, site, trace, capsys):
    """It comes before what the object itself has."""
    acme()
    add(site, f"\n{method} = property(lambda self: lambda *args, **kwargs: {body})\n")
    code, out, err = replayed(capsys, trace)
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert err.startswith("attncore: error: backend acme (attn-acme 1.0)")
    assert words in err


def test_a_backend_catches_what_it_raises_itself(acme, trace, capsys):
    """Its own calls of itself raise what they raise, and no BackendError."""
    acme(
        allocate="if num_blocks > 50:\n            try:\n                self.impl('a', scale=1.0, absent=1)\n"
        "            except (TypeError, ValueError):\n                pass"
    )
    code, out, err = replayed(capsys, trace, "--json")
    assert err == ""
    assert json.loads(out)["verification"]  # of a backend that returns the query: no attention
    assert code == 1


@pytest.mark.parametrize(
    ("where", "statement", "words"),
    [
        ("init", "raise ValueError('head_size: 64 found; take 128')", "--head-size: 64 found; take 128"),
        ("allocate", "raise ValueError('num_blocks: 100 found; take 9')", "--num-blocks: 100 found; take 9"),
        (
            "allocate",
            "raise torch.OutOfMemoryError('CUDA out of memory')",
            "--num-blocks: no memory for 2 caches of 100 blocks",
        ),
        ("allocate", "torch.empty(2**60)", "--num-blocks: no memory for 2 caches of 100 blocks"),
        ("forward", "raise torch.OutOfMemoryError('CUDA out of memory')", "attention: a step of 513 tokens does not"),
        ("forward", "torch.empty(2**45)", "attention: a step of 513 tokens does not fit in memory ("),
    ],
)
def test_refusals_and_memory_stay_what_they_are(where, statement, words, acme, trace, capsys):
    acme(**{where: statement})
    code, _, err = replayed(capsys, trace, "--head-size", "64")
    assert (code, err.count("\n")) == (2, 1), err
    assert words in err


@pytest.mark.parametrize(
    ("where", "statement", "words"),
    [
        (
            "forward",
            "raise ValueError('bad stride')",
            "failed in forward of layer 'model.layers.0.self_attn': ValueErr",
        ),
        ("forward", "return None", "forward of layer 'model.layers.0.self_attn' returned None; the contract says"),
        ("forward", "return query.to_sparse()", "returned a tensor of layout torch.sparse_coo; the contract says"),
        ("impl", "raise RuntimeError('no')", "failed in impl: RuntimeError: no"),
        ("allocate", "raise RuntimeError('no')", "failed in allocate_kv_cache: RuntimeError: no"),
        ("plan", "raise BrokenPipeError", "failed in plan: BrokenPipeError: "),
        ("init", "raise KeyError(1)", "failed in its creation: KeyError: 1"),
    ],
)
def test_a_model_over_a_backend_that_fails(where, statement, words, acme, trace, tmp_path, capsys):
    pytest.importorskip("transformers")
    acme(**{where: statement})
    code, out, err = replayed(capsys, trace, "--model", llama(tmp_path))
    assert (code, out) == (1, ""), err
    assert err.splitlines()[-1].startswith("attncore: error: backend acme (attn-acme 1.0)")
    assert words in err
