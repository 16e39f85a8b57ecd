"""The host's time of a step that is adopted from an engine's tensors, eager and of a captured size, microseconds.

    python benchmarks/adopted_steps.py [--backend flashinfer] [--rows 256] [--json FILE]

The engine makes new views of its buffers for each step, as engines do; these are not counted. Without a plan: a backend
that has none and reads a block table, and one that reads page lists. With a plan: ``--backend``, on CUDA. On a CPU the
same without a launch, for what is compiled and the Python around it. Medians of many turns.
"""

import argparse
import json
import platform
import statistics
import time

import torch

import attncore
from attncore import AdoptedSteps, AttentionBackend, AttentionImpl, BackendConfig, BackendSpec, MultipleOf

BLOCK, MODEL_LEN, BLOCKS = 16, 4096, 65536


class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        return query


class Plain(AttentionBackend):
    """Has no plan; its attention gives the queries back."""

    name = "plain"
    impl_class = Impl

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


def plain(device, *, page_list):
    spec = BackendSpec(
        name="plain", api=1, factory="nowhere:Plain", devices={"any": 0}, dtypes={"bfloat16"}, head_sizes={128},
        block_sizes=MultipleOf(1), device_needs={"paged_kv_indices"} if page_list else (), cuda_graph="always",
    )  # fmt: skip
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "block_size": BLOCK}
    return Plain(BackendConfig(**sizes, device=device, spec=spec))


def planning(name):
    """A backend of a library, with one layer; None where it does not run here."""
    asked = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", "block_size": BLOCK}
    try:
        backend = attncore.select(**asked, backend=name).create()
    except attncore.AttncoreError as error:
        print(f"{name} does not run here: {str(error).splitlines()[0]}")
        return None
    backend.impl("layers.0", scale=128**-0.5)
    return backend


class Engine:
    """An engine's buffers for ``rows`` decodes, each one token longer in every step."""

    def __init__(self, backend, rows, *, captured):
        device = backend.config.device
        self.steps = AdoptedSteps(
            backend, max_num_reqs=rows, max_num_tokens=8192, max_model_len=MODEL_LEN, num_blocks=BLOCKS
        )
        self.rows, self.host_starts = rows, torch.arange(rows + 1, dtype=torch.int32)
        self.host_lengths = torch.randint(1, MODEL_LEN - 2000, (rows,), dtype=torch.int32)
        self.starts, self.lengths = self.host_starts.to(device), self.host_lengths.to(device)
        self.table = torch.randint(1, BLOCKS, (rows, MODEL_LEN // BLOCK), dtype=torch.int32, device=device)
        self.slots = torch.arange(rows, device=device)
        if captured:
            self.steps.build(**self.given(), capturing=True)

    def given(self):
        n = self.rows
        return {
            "query_start_loc": self.starts[: n + 1], "seq_lens": self.lengths[:n], "block_table": self.table[:n],
            "slot_mapping": self.slots[:n], "host_query_start_loc": self.host_starts[: n + 1],
            "host_seq_lens": self.host_lengths[:n],
        }  # fmt: skip

    def microseconds(self, turns):
        """The median of ``turns`` builds, the device idle at each."""
        found = []
        for turn in range(turns + 50):
            given = self.given()
            if self.lengths.is_cuda and turn % 10 == 0:
                torch.cuda.synchronize()
            start = time.perf_counter()
            self.steps.build(**given)
            found.append((time.perf_counter() - start) * 1e6)
        return statistics.median(found[50:])


def kernel_microseconds(rows, turns):
    """The compiled call alone."""
    engine = Engine(plain("cpu", page_list=False), rows, captured=False)
    fill, starts, lengths = engine.steps._rows[0].fill, engine.host_starts.numpy(), engine.host_lengths.numpy()
    found = []
    for _ in range(turns):
        start = time.perf_counter()
        fill(starts, lengths, rows, MODEL_LEN // BLOCK, 0, True, False)
        found.append((time.perf_counter() - start) * 1e6)
    return statistics.median(found)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="flashinfer", help="the backend whose plan is measured, on CUDA")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--json", help="a file to write the medians to")
    asked = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = {
        "without a plan": plain(device, page_list=False),
        "without a plan, with page lists": plain(device, page_list=True),
    }
    if device == "cuda" and (backend := planning(asked.backend)) is not None:
        backends[f"with the plan of {asked.backend}"] = backend
    medians = {"the compiled call": kernel_microseconds(asked.rows, asked.turns)}
    for name, backend in backends.items():
        for captured in (False, True):
            engine = Engine(backend, asked.rows, captured=captured)
            medians[f"{name}, {'captured' if captured else 'eager'}"] = engine.microseconds(asked.turns)
    where = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    print(f"{asked.rows} decodes, {where}, Python {platform.python_version()}, torch {torch.__version__}: median us")
    for name, median in medians.items():
        print(f"  {median:8.1f}  {name}")
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({"rows": asked.rows, "where": where, "torch": torch.__version__, "us": medians}, file, indent=1)


if __name__ == "__main__":
    main()
