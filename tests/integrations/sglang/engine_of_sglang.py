"""SGLang's engine on a tiny model with random weights, on the CPU: prints the tokens that it generates, as JSON.

python engine_of_sglang.py MODEL NAME [OPTION=VALUE ...]
"""

import json
import os
import sys

PROMPTS = [[(7 * i + j * j) % 900 + 3 for j in range(length)] for i, length in enumerate((5, 17, 40, 100, 3))]
NEW_TOKENS = 24
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.1,
    "page_size": 16,
    "max_running_requests": 8,
    "sampling_backend": "pytorch",
    "chunked_prefill_size": 64,
    "log_level": "warning",
}


def generate(model, name, options):
    """The tokens behind each prompt; then behind the first half of them once more, whose pages are found again."""
    import sglang

    engine = sglang.Engine(model_path=model, attention_backend=name, **{**OPTIONS, **options})
    try:
        settings = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        first = engine.generate(input_ids=PROMPTS, sampling_params=settings)
        again = engine.generate(input_ids=PROMPTS[1:4], sampling_params=settings)
    finally:
        engine.shutdown()
    return {
        "tokens": [list(one["output_ids"]) for one in first],
        "again": [list(one["output_ids"]) for one in again],
        "cached": [one["meta_info"]["cached_tokens"] for one in again],
    }


def main(model, name, *rest):
    options = {}
    for text in rest:
        key, _, value = text.partition("=")
        options[key] = json.loads(value)
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(json.dumps(generate(model, name, options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
