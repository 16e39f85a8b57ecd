"""examples/engine.py over a Llama with random weights, with the clocks of benchmarks/served_step.py."""

import argparse
import functools
import random

import engine as example

ENGINE_KINDS = ("decode", "come and go", "chunk")
"""The kinds of steps that the engine has."""

CHUNK = 512


@functools.cache
def model_on(device):
    from transformers_gpu import model_of

    return model_of(argparse.Namespace(device=device, tiny=device == "cpu"))


class Tokens:
    """What was sampled, which waits for the device."""

    def __init__(self, tokens, device, parts):
        self.tolist = parts.around(functools.partial(device.tokens, tokens), "wait")


class Graph:
    def __init__(self, graph, device, parts):
        self.replay = parts.around(functools.partial(device.launch, graph.replay), "launch")


class Served(example.Engine):
    """The engine, with clocks; a request that joins keeps the kind of its steps going."""

    def __init__(self, model, kind, rows, device, parts, **options):
        self.on, self.parts, self.kind = device, None, kind
        super().__init__(model, **options)
        self.parts = parts
        for owner, names, part in (
            (self.batch, ("add_request", "append_blocks_many", "remove_request"), "batch"),
            (self.input_ids, ("give",), "fields"),
            (self.sampled, ("fetch",), "fields"),
            (self, ("_schedule", "_num_steps"), "schedule"),
            (self, ("_book",), "book"),
        ):
            for name in names:
                setattr(owner, name, parts.around(getattr(owner, name), part))
        self.graphs = {size: Graph(graph, device, parts) for size, graph in self.graphs.items()}
        fetch, run_ahead = self.sampled.fetch, self.builder.run_ahead
        self.sampled.fetch = lambda: Tokens(fetch(), device, parts)
        self.builder.run_ahead = lambda *args, **named: self._clocked(run_ahead(*args, **named))
        self.rows = rows

    def _clocked(self, steps):
        steps.replay = self.parts.around(steps.replay, "replay")
        return steps

    def _forward(self, metadata):
        if self.parts is None:  # a warm-up or a capture
            return super()._forward(metadata)
        with self.parts.part("launch"):
            return self.on.launch(super()._forward, metadata)

    def step(self):
        with self.parts.part("engine"):
            return super().step()

    def fill(self, prompt_tokens, steps):
        """As many requests as there are rows, none of which ends by itself before ``steps`` more are run."""
        vocab = self.vocab_size
        prompts = [[random.randrange(3, vocab) for _ in range(prompt_tokens)] for _ in range(self.rows)]
        for prompt in prompts:
            self.add_request(prompt, steps)
        while self.waiting or any(len(one.tokens) == len(prompt) for one in self.running.values()):
            super().step()


class Going(Served):
    """Each step some end, and as many join."""

    def step(self):
        gone = [request for request in self.running.values() if random.random() < 1 / 64]
        for request in gone:
            self.cancel(request)
            self.add_request(request.tokens[:8], request.max_new_tokens)
        return super().step()


class Chunks(Served):
    """There is always a prompt to be computed beside the decodes."""

    def step(self):
        if not self.waiting and all(one.computed for one in self.running.values()):
            self.add_request([random.randrange(3, self.vocab_size) for _ in range(4 * CHUNK)], 1)
        return super().step()


def engine_over_llama(kind, rows, name, args, device, parts):
    """An engine with ``rows`` running requests."""
    context = args.context if args.device == "cuda" else 64
    filling = -(-rows * context // CHUNK)  # steps in which the first requests decode beside the others' prompts
    steps = args.steps * 2 + 200 + filling
    longest = max(context + steps + 8, 4 * CHUNK + 8)
    size = 256 if name == "flash" else 16
    engine = {"come and go": Going, "chunk": Chunks}.get(kind, Served)(
        model_on(args.device), kind, rows, device, parts, num_blocks=(rows + 2) * (-(-longest // size) + 1) + 1,
        max_num_reqs=rows + (kind == "chunk"), max_num_batched_tokens=CHUNK + rows, max_model_len=longest,
        block_size=size, graph_sizes=(rows,) if args.device == "cuda" else (), ahead=args.ahead,
        **({"backend": name} if args.device == "cuda" else {}),
    )  # fmt: skip
    engine.fill(context, steps)
    return engine
