"""An engine's own tensors, made from the steps of a persistent builder, which adopted steps are compared with."""

import numpy as np
import torch

import attncore
from attncore import AdoptedSteps, InputBatch, MetadataBuilder
from attncore.builder.fields import ARRAYS, COUNTS, ENCODER_ARRAYS, OPTIONAL

BLOCK, MODEL_LEN, BLOCKS = 4, 60, 200
FIELDS = sorted(ARRAYS - ENCODER_ARRAYS - OPTIONAL)


def reference(**more):
    request = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "block_size": BLOCK} | more
    return attncore.select(**request, backend="reference").create()


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def tensors_of(metadata, device="cpu"):
    """The step as an engine has it: tensors of its own, whose table has a row stride of its own."""
    host = metadata.host
    wide = torch.zeros((metadata.num_reqs, host.block_table.shape[1] + 3), dtype=torch.int32)
    wide[:, : host.block_table.shape[1]] = torch.from_numpy(np.array(host.block_table))
    given = {name: torch.from_numpy(np.array(getattr(host, name))) for name in ("query_start_loc", "seq_lens")}
    given["slot_mapping"] = torch.from_numpy(np.array(host.slot_mapping))
    given = {name: tensor.to(device) for name, tensor in given.items()}
    return given | {"block_table": wide.to(device)[:, : host.block_table.shape[1]]}


class Engine:
    """A batch whose steps are built by the persistent builder and adopted, one beside the other."""

    def __init__(self, backend, kernels=None, seed=0, decode_threshold=1, device="cpu", **options):
        self.rng = np.random.default_rng(seed)
        size = backend.config.block_size
        self.model_len = size * (MODEL_LEN // BLOCK)
        self.batch = InputBatch(
            max_num_reqs=8, max_model_len=self.model_len, block_size=size, num_blocks=BLOCKS, kernels=kernels
        )
        self.builder = MetadataBuilder(
            self.batch, backend, max_num_batched_tokens=256, decode_threshold=decode_threshold, **options
        )
        self.steps = AdoptedSteps(
            backend, max_num_reqs=8, max_num_tokens=256, max_model_len=self.model_len, num_blocks=BLOCKS,
            decode_threshold=decode_threshold, kernels=kernels,
        )  # fmt: skip
        self.free = list(range(1, BLOCKS))
        self.names = iter(range(10**9))
        self.device, self.held = device, {}

    def change(self):
        """Requests come and go; what each runs in the next step."""
        for name in [name for name in self.held if self.batch.num_computed_tokens(name) > self.model_len - 12]:
            self.leave(name)
        if self.held and self.rng.random() < 0.1:
            self.leave(next(iter(self.held)))
        while len(self.held) < 8 and (not self.held or self.rng.random() < 0.5):
            name, count = next(self.names), MODEL_LEN // BLOCK
            self.held[name] = [self.free.pop() for _ in range(count)]
            self.batch.add_request(name, self.held[name])
        return {
            name: 1 if self.batch.num_computed_tokens(name) else int(self.rng.integers(1, 9)) for name in self.held
        } | ({next(iter(self.held)): int(self.rng.integers(1, 9))} if self.rng.random() < 0.3 else {})

    def leave(self, name):
        self.free += self.held.pop(name)
        self.batch.remove_request(name)

    def step(self, scheduled=None, **more):
        """A step, built and adopted."""
        built = self.builder.build(self.change() if scheduled is None else scheduled)
        given = tensors_of(built, self.device)
        host = {f"host_{name}": np.array(getattr(built.host, name)) for name in ("query_start_loc", "seq_lens")}
        return built, self.steps.build(**given, **host, **more)


def same_counts(one, other):
    assert {name: getattr(one, name) for name in COUNTS} == {name: getattr(other, name) for name in COUNTS}


def same_arrays(one, other, names=FIELDS):
    """The same elements, names, dtypes and lengths, on the device and on the host."""
    for name in names:
        for here, there in ((one, other), (one.host, other.host)):
            left, right = getattr(here, name), getattr(there, name)
            left, right = (array if isinstance(array, np.ndarray) else array.cpu().numpy() for array in (left, right))
            assert left.dtype == right.dtype, name
            if name == "block_table":  # the batch's live table is wider; what a row does not hold is 0 there
                right = right[:, : left.shape[1]]
            np.testing.assert_array_equal(left, right, name)


def as_on_a_device(steps):
    """Has ``steps`` treat tensors of the host as those of a device, whose numbers nobody reads."""
    steps._on_cpu = steps._known.checks = steps._sizes.values["_on_cpu"] = False
