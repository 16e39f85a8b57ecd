"""Cross layers over steps of the list builder in which a row might read another request's encoder tokens."""

import pytest
import torch

import attncore
from attncore.builder import Sequence, SequenceGroup

PROMPT = SequenceGroup(True, [Sequence(0, 3, 0, [1])], encoder_seq_len=6, cross_block_table=[2, 3])
DECODE = SequenceGroup(False, [Sequence(1, 1, 5, [4, 5])], encoder_seq_len=7, cross_block_table=[6, 7])


@pytest.fixture
def backend():
    request = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32", "block_size": 4}
    return attncore.select(**request, features={"encoder_decoder"}, backend="rocm").create()


def step(backend):
    return backend.get_builder_cls()(4, encoder_decoder=True, backend=backend).build([PROMPT, DECODE])


@pytest.mark.parametrize("view", ["prefill_metadata", "decode_metadata"])
def test_views_of_a_mixed_step_are_refused(backend, view):
    """They keep the whole step's encoder fields, whose first row is the prompt's."""
    cross, cache = backend.impl("0", scale=0.25, attn_type="encoder_decoder"), backend.allocate_kv_cache(10)
    device = backend.config.device
    query, key, value = (torch.zeros(tokens, heads, 16, device=device) for tokens, heads in ((3, 4), (6, 2), (6, 2)))
    metadata = getattr(step(backend), view)
    for write in (True, False):
        with pytest.raises(ValueError, match=r"^metadata: encoder_seq_lens has 2 rows for 1 request; views of a mixed"):
            cross.forward(query, key, value, cache, metadata, write=write)


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("missing", ["key", "value"])
def test_prompts_without_their_encoders_keys_are_refused(backend, missing, write):
    """Their rows of the table are zeros: block 0 is another request's."""
    cross, cache = backend.impl("0", scale=0.25, attn_type="encoder_decoder"), backend.allocate_kv_cache(10)
    device = backend.config.device
    given = {name: torch.zeros(6, 2, 16, device=device) for name in ("key", "value") if name != missing}
    given = {"key": None, "value": None, **given}
    with pytest.raises(ValueError, match=f"^{missing}: None found"):
        cross.forward(
            torch.zeros(4, 4, 16, device=device), **given, kv_cache=cache, metadata=step(backend), write=write
        )
