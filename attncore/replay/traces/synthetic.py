"""A workload for when there is no trace: stated statistics, drawn from a seed."""

from __future__ import annotations

import numpy as np

from attncore.replay.traces.trace import HASH_BLOCK, Request, Trace

NUM_REQUESTS = 200
ARRIVALS_PER_SECOND = 4.0
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MAX = 600, 0.9, 8192  # tokens of the user's part; sigma of the logarithm
OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_MAX = 180, 0.6, 1024
SYSTEM_PROMPTS = 4  # each HASH_BLOCK tokens, put before half of the prompts
DESCRIPTION = (
    f"Poisson arrivals, {ARRIVALS_PER_SECOND:g} requests a second; prompts lognormal, median {PROMPT_MEDIAN} tokens, "
    f"sigma {PROMPT_SIGMA}, at most {PROMPT_MAX}; outputs lognormal, median {OUTPUT_MEDIAN}, sigma {OUTPUT_SIGMA}, "
    f"at most {OUTPUT_MAX}; half of the prompts begin with one of {SYSTEM_PROMPTS} system prompts of {HASH_BLOCK}"
)


def synthetic_trace(num_requests: int, seed: int) -> Trace:
    """``num_requests`` requests as ``DESCRIPTION`` says; the same seed gives the same requests."""
    random = np.random.default_rng(seed)
    # The first request arrives at 0, as in a trace that is read from a file.
    arrivals = np.cumsum(random.exponential(1 / ARRIVALS_PER_SECOND, num_requests))
    prompts = _lengths(random, num_requests, PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MAX)
    outputs = _lengths(random, num_requests, OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_MAX)
    system = np.where(random.random(num_requests) < 0.5, random.integers(SYSTEM_PROMPTS, size=num_requests), -1)
    requests = []
    next_id = SYSTEM_PROMPTS
    for index in range(num_requests):
        own_blocks = -(-int(prompts[index]) // HASH_BLOCK)
        own_ids = tuple(range(next_id, next_id + own_blocks))
        next_id += own_blocks
        shared = (int(system[index]),) if system[index] >= 0 else ()
        requests.append(
            Request(
                row=index + 1,
                arrival=float(arrivals[index] - arrivals[0]),
                prompt_tokens=int(prompts[index]) + HASH_BLOCK * len(shared),
                output_tokens=int(outputs[index]),
                hash_ids=shared + own_ids,
            )
        )
    return Trace("synthetic", "synthetic", tuple(requests))


def _lengths(random: np.random.Generator, count: int, median: int, sigma: float, largest: int) -> np.ndarray:
    lengths = np.rint(random.lognormal(np.log(median), sigma, count))
    return np.clip(lengths, 1, largest).astype(np.int64)
