"""The kit on a backend that runs decodes only, from the device's arrays alone; and, on a GPU, captured and watched."""

import pytest
import torch

from attncore.testing.harness.run_suite import conformance

QUIET = ("-p", "no:terminal")
LIGHT = """
from attncore import BackendSpec, MultipleOf, hookimpl

@hookimpl
def attncore_backend():
    return BackendSpec(
        name={name!r}, api=1, factory="attn_{name}_heavy:Backend", devices={{"any": 5}},
        dtypes={{"float32", "bfloat16"}}, head_sizes=MultipleOf(8), block_sizes=MultipleOf(4), phases={{"decode"}},
        features={{"sliding_window"}}, cuda_graph="uniform_decode",
        device_needs={{"slot_mapping", "block_table", "seq_lens"}},
    )
"""
HEAVY = """
import torch
from attncore import AttentionBackend, AttentionImpl

class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
        if write:
            self.write_cache(key, value, kv_cache, metadata)
        lengths, table = self.lengths(metadata), metadata.block_table
        rows = min(len(query), len(table))
        cached = kv_cache[table[:rows].long()]
        keys, values = cached[:, :, 0].flatten(1, 2).float(), cached[:, :, 1].flatten(1, 2).float()
        position = torch.arange(keys.shape[1], device=query.device)
        seen = position < lengths[:rows, None]
        if self.sliding_window is not None:
            seen &= position >= lengths[:rows, None] - self.sliding_window
        keys, values = (part.masked_fill(~seen[:, :, None, None], 0) for part in (keys, values))
        group = query.shape[1] // keys.shape[2]
        keys, values = (part.repeat_interleave(group, 2) for part in (keys, values))
        score = torch.einsum("rhd,rkhd->rhk", query[:rows].float(), keys) * self.scale
        weight = score.masked_fill(~seen[:, None], -1e30).softmax(-1)
        output = torch.zeros_like(query) if output is None else output
        output[:rows] = torch.einsum("rhk,rkhd->rhd", weight, values).to(query.dtype)
        return output

    def lengths(self, metadata):
        return metadata.seq_lens

class Backend(AttentionBackend):
    impl_class = Impl
    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (num_blocks, 2, block_size, num_kv_heads, head_size)
"""
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def states(report):
    return {row["capability"]: row["state"] for row in report.rows()}


def test_a_backend_for_decodes_passes_and_prefill_is_unsupported(site):
    site.plugin("decodes", LIGHT.format(name="decodes"), heavy=HEAVY)
    code, report = conformance("decodes", settings="EXAMPLES = 6\n", options=QUIET)
    assert (code, report.failures) == (0, [])
    found = states(report)
    for row in ("decode", "sliding_window", "NaN canary", "graph padding", "block ids at the end of the pool"):
        assert found[row] == "supported"
    for row in ("chunked prefill", "mixed batches", "prefix hits", "list builder"):
        assert found[row] == "unsupported"


@pytest.mark.gpu
@needs_device
def test_on_a_device_it_neither_waits_nor_breaks_when_captured(site):
    site.plugin("decodes", LIGHT.format(name="decodes"), heavy=HEAVY)
    settings = 'EXAMPLES = 6\nDEVICE = "cuda:0"\n'
    code, report = conformance("decodes", settings=settings, options=QUIET)
    assert (code, report.failures) == (0, [])
    assert states(report)["captured graph"] == states(report)["no synchronisation"] == "supported"


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("return torch.tensor(metadata.seq_lens.tolist(), device='cuda')", "wait"),
        ("return torch.full_like(metadata.seq_lens, 1) * int(metadata.host.seq_lens[0])", "captured"),
        ("return (metadata.seq_lens, metadata.block_table[:, -1:].fill_(1))[0]", "uses_its_metadata_again"),
    ],
)
def test_on_a_device_faults_are_found(site, fault, test):
    heavy = HEAVY.replace("return metadata.seq_lens", fault)
    site.plugin("decodes", LIGHT.format(name="decodes"), heavy=heavy)
    code, report = conformance("decodes", settings='DEVICE = "cuda:0"\n', options=(*QUIET, "-k", test))
    assert code == 1
    assert report.failures


@pytest.mark.gpu
@needs_device
def test_the_reference_passes_on_a_device():
    code, report = conformance("reference", settings='EXAMPLES = 10\nDEVICE = "cuda:0"\n', options=QUIET)
    assert (code, report.failures) == (0, [])
    assert states(report)["no synchronisation"] == "supported"
