"""Continue a text with a model of transformers, run by engine.py; without one,
a tiny model with random weights.

python examples/generate.py   # shows that it works
python examples/generate.py MODEL Once upon   # a model

MODEL is a folder or a name. One that is no folder here is a name of Hugging Face's hub, from which
transformers fetches it over the network unless it has done so before
(HF_HUB_OFFLINE=1 keeps it from asking).
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import Any

from command_line import Formatter, add_model

TOKENS = 100


def tiny(kind: dict[str, Any]) -> None:
    """Tokens of three prompts of a model with random weights."""
    from engine import Engine
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=1000)
    engine = Engine(LlamaForCausalLM(config).to(**kind), num_blocks=64)
    print(textwrap.fill(engine.choice.explain().splitlines()[0], 60, subsequent_indent="    "))
    print("a tiny Llama, random weights: other tokens each time")
    for number, token in engine.generate([[1, 2, 3], list(range(40)), [7] * 17], max_new_tokens=8):
        print(f"prompt {number}: token {token}")
    print("it works; with a model of your own:")
    print("    python examples/generate.py MODEL Once upon")


def continued(name: str, text: str, kind: dict[str, Any]) -> None:
    """``text`` and what the model says after it, as it comes."""
    from engine import Engine
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name)
    engine = Engine(model.to(**kind), tokenizer=AutoTokenizer.from_pretrained(name))
    print(text, end="", flush=True)
    for _, piece in engine.generate([text], max_new_tokens=TOKENS):
        print(piece, end="", flush=True)
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add_model(parser, nargs="?")
    parser.add_argument("words", nargs="*", default=(), metavar="WORD", help="the text (default: Once upon a time)")
    asked = parser.parse_args()
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        from attncore.how_to_install import missing_module

        print(f"generate.py: {missing_module(error, 'transformers')}", file=sys.stderr)
        return 2
    kind = {"device": "cuda", "dtype": torch.bfloat16} if torch.cuda.is_available() else {}
    try:
        if asked.model is None:
            tiny(kind)
        else:
            continued(asked.model, " ".join(asked.words) or "Once upon a time", kind)
    except (OSError, ValueError) as error:  # no such model, or one that the engine does not run
        print(f"generate.py: {asked.model}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
