"""The kit on caches that are not the reference's: fp8 with scales, heads first, a pair of tensors, other axes."""

import pytest

from attncore.testing.harness.run_suite import conformance

QUIET = ("-p", "no:terminal")
LIGHT = """
from attncore import BackendSpec, MultipleOf, hookimpl
from attncore.builder.fields import ARRAYS

@hookimpl
def attncore_backend():
    return BackendSpec(
        name={name!r}, api=1, factory="attn_{name}_heavy:Backend", devices={{"any": 5}},
        dtypes={{"float32", "float16"}}, kv_cache_dtypes={{"fp8_e4m3", "fp8_e5m2"}},
        head_sizes={{16, 32}}, block_sizes={{4, 16}}, kv_cache_layouts=("HND", "NHD"),
        features={{"sliding_window", "kv_scales", "kv_scales_on_device", "kv_scales_per_head"}},
        cuda_graph="uniform_decode", host_needs=ARRAYS, device_needs=ARRAYS,
        unsupported={{"sinks": "the kernel has no place for them"}},
    )
"""
HEAVY = """
import dataclasses
import torch
from attncore import AttentionBackend, AttentionImpl
from attncore.reference import ReferenceBackend

class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        config, backend = self.backend.config, self.backend
        inner = backend.inner.impl(
            self.layer_name, scale=self.scale, sliding_window=self.sliding_window, logits_soft_cap=self.logits_soft_cap
        )
        views = backend.views(kv_cache)
        scales = [torch.as_tensor(scale).view(-1, 1) for scale in (self.k_scale, self.v_scale)]
        plain = [view.float() * scale for view, scale in zip(views, self.read(scales))]
        plain = [tensor.to(query.dtype) for tensor in plain]
        answer = inner.forward(query, key, value, plain, metadata, output)
        slots = metadata.slot_mapping
        for view, new, scale in zip(views, (key, value), scales):
            stored = (new[: len(slots)] / scale).to(backend.kv_cache_torch_dtype()).view(torch.uint8)
            blocks, offsets = slots // config.block_size, slots % config.block_size
            view.view(torch.uint8)[blocks, offsets] = stored
        return answer

    def read(self, scales):
        return scales

class Backend(AttentionBackend):
    impl_class = Impl
    pair = False

    def __init__(self, config):
        super().__init__(config)
        if config.head_size not in (16, 32) or config.block_size not in (4, 16):
            raise ValueError(f"head_size: {config.head_size} or block_size {config.block_size} is not the kernel's")
        plain = dataclasses.replace(config, kv_cache_dtype="auto", kv_cache_layout="NHD", spec=None)
        self.inner = ReferenceBackend(plain)

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        rest = (num_kv_heads, block_size) if self.config.kv_cache_layout == "HND" else (block_size, num_kv_heads)
        return (num_blocks, 2, *rest, head_size)

    def views(self, kv_cache):
        parts = kv_cache if self.pair else (kv_cache[:, 0], kv_cache[:, 1])
        return [part.transpose(1, 2) if self.config.kv_cache_layout == "HND" else part for part in parts]
"""
PAIR = """
def allocate_kv_cache(self, num_blocks):
    whole = AttentionBackend.allocate_kv_cache(self, num_blocks)
    return (whole[:, 0].contiguous(), whole[:, 1].contiguous())

def swap_blocks(self, source, target, src_to_dst):
    pairs = torch.as_tensor(src_to_dst)
    for a, b in zip(source, target):
        b.view(torch.uint8)[pairs[:, 1]] = a.view(torch.uint8)[pairs[:, 0]]

Backend.allocate_kv_cache, Backend.swap_blocks, Backend.pair = allocate_kv_cache, swap_blocks, True
"""


def plant(site, name, code=""):
    site.plugin(name, LIGHT.format(name=name), heavy=HEAVY + code)


@pytest.mark.parametrize("code", ["", PAIR], ids=["blocks_first", "pair_of_tensors"])
def test_an_fp8_cache_with_heads_first_passes(site, code):
    plant(site, "bytes", code)
    exit_code, report = conformance("bytes", settings="EXAMPLES = 8\n", options=QUIET)
    assert (exit_code, report.failures) == (0, [])
    states = {row["capability"]: row["state"] for row in report.rows()}
    for row in (
        "kv_scales",
        "kv_scales_on_device",
        "kv_scales_per_head",
        "scales set later",
        "cache fp8_e4m3",
        "cache fp8_e5m2",
        "layout HND",
        "layout NHD",
        "sliding_window",
    ):
        assert states[row] == "supported"


@pytest.mark.parametrize("argument", ["k_scale", "v_scale"])
def test_an_ignored_scale_is_found(site, argument):
    code = f"""
def init(self, backend, layer_name, **features):
    features[{argument!r}] = 1.0
    AttentionImpl.__init__(self, backend, layer_name, **features)
Impl.__init__ = init
"""
    plant(site, "unscaled", code)
    exit_code, report = conformance("unscaled", options=(*QUIET, "-k", "test_scales_of_an_fp8_cache"))
    assert exit_code == 1
    assert [one.test for one in report.failures] == [f"test_scales_of_an_fp8_cache[{argument}]"]


SCALE_FAULTS = {
    "another heads scale": (
        "per_head or each_head",
        "def read(self, scales):\n    return [one.flip(0) for one in scales]",
    ),
    "swapped scales": ("each_head", "def read(self, scales):\n    return scales[::-1]"),
    "one scale for all heads": ("each_head", "def read(self, scales):\n    return [one[:1] for one in scales]"),
    "read at construction": (
        "set_after and numbers",
        "def read(self, scales):\n    return vars(self).setdefault('kept', [one.clone() for one in self.first])\n"
        "def init(self, *given, **features):\n    AttentionImpl.__init__(self, *given, **features)\n"
        "    self.first = [torch.as_tensor(one).reshape(-1, 1) for one in (self.k_scale, self.v_scale)]\n"
        "Impl.__init__ = init",
    ),
    "kept from the first step": (
        "captured_sizes_see",
        "def read(self, scales):\n    return vars(self).setdefault('kept', [one.clone() for one in scales])",
    ),
    "another tensor than graphs read": (
        "captured_sizes_see",
        "def read(self, scales):\n    return scales\n"
        "def set_scales(self, k_scale, v_scale):\n    self.other = k_scale, v_scale\nImpl.set_scales = set_scales",
    ),
    "calculated without the headroom": (
        "calculated",
        "def read(self, scales):\n    return scales\n"
        "def calculate(self, key, value):\n    self.set_scales(*(one.abs().amax() / 448 for one in (key, value)))\n"
        "Impl.calculate_kv_scales = calculate",
    ),
}


@pytest.mark.parametrize("fault", SCALE_FAULTS)
def test_wrong_scales_are_found(site, fault):
    chosen, code = SCALE_FAULTS[fault]
    name = fault.replace(" ", "_")
    plant(site, name, f"{code}\nImpl.read = read")
    exit_code, report = conformance(name, settings="EXAMPLES = 5\n", options=(*QUIET, "-k", chosen))
    assert exit_code == 1
    wrong = ("differs from dense", "calculate_kv_scales made k_scale [128.0], not 256.0")
    assert report.failures
    assert all(any(said in one.reason for said in wrong) for one in report.failures)


def test_heads_and_tokens_confused_is_found(site):
    plant(site, "confused", "Backend.views = lambda self, cache: [cache[:, 0], cache[:, 1]]")
    exit_code, report = conformance("confused", settings="EXAMPLES = 5\n", options=(*QUIET, "-k", "layout"))
    assert exit_code == 1
    assert "test_kv_cache_layout[HND]" in [one.test for one in report.failures]
