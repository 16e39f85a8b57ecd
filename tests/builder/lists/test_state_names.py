"""CommonAttentionState: its clones and subclasses, its names of the first generation, and the pages that name them."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from builder.lists.captured_state import decodes, made

import attncore
from attncore import AttentionBackend
from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.builder.first_generation_names import FirstGenerationStateNames
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.errors import CaptureError
from attncore.reference import ReferenceBackend


def test_a_clone_is_for_one_size_and_shares_the_buffers():
    builder, state = made()
    clone = state.graph_clone(2)
    assert clone.captured == (2,)
    assert [clone.pad_size(n) for n in (1, 2, 3)] == [1, 0, -1]
    metadata = builder.build(decodes([(5, [3, 4])]), 1)
    captured = clone.prepare(metadata)
    assert captured is state.prepare(metadata)
    state.begin_forward(metadata)  # either knows
    clone.begin_forward(metadata)
    with pytest.raises(CaptureError, match=r"metadata: padded to 4 requests, which was not captured \(captured: 2\)"):
        clone.prepare(builder.build(decodes([(5, [3, 4])]), 3))
    with pytest.raises(CaptureError, match=r"graph_clone: call it inside"):
        state.graph_clone(3)
    with state.graph_capture(4):
        early = state.graph_clone(3)
        with pytest.raises(CaptureError, match="metadata_for_capture: 4 requests, but this clone is for 3"):
            early.metadata_for_capture(4)
        early.metadata_for_capture(3)
    assert state.captured == (1, 2, 3, 4)


def test_a_clone_is_of_the_subclass():
    class State(attncore.AttentionState):
        def __init__(self, backend=None, builder=None):
            super().__init__(backend, builder)
            self.workspace = object()

    state = State(None, CommonMetadataBuilder(4, max_seq_len_to_capture=8))
    with state.graph_capture(2):
        clone = state.graph_clone(2)
    assert type(clone) is State
    assert clone.workspace is state.workspace


def test_the_default_of_every_backend():
    assert attncore.AttentionState is CommonAttentionState
    assert AttentionBackend.get_state_cls() is CommonAttentionState
    assert ReferenceBackend.get_state_cls() is CommonAttentionState
    program = "import sys, attncore; attncore.AttentionBackend; print('numpy' in sys.modules); attncore.AttentionState"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_names_of_the_first_generation():
    builder = CommonMetadataBuilder(4, max_seq_len_to_capture=8, encoder_decoder=True)
    state = CommonAttentionState(None, builder)
    with state.graph_capture(2):
        captured = state.graph_capture_get_metadata_for_batch(2, is_encoder_decoder_model=True)
        with pytest.raises(ValueError, match="is_encoder_decoder_model: False, but the state's builder"):
            state.graph_capture_get_metadata_for_batch(2)
    group = SequenceGroup(False, [Sequence(0, 1, 5, [3, 4])], False, 6, [7, 8])
    metadata = builder.build([group], 1)
    buffers = state.get_graph_input_buffers(metadata, True)
    expected = {
        "slot_mapping": captured.slot_mapping, "seq_lens_tensor": captured.seq_lens,
        "block_tables": captured.block_table, "encoder_seq_lens_tensor": captured.encoder_seq_lens,
        "cross_slot_mapping": captured.cross_slot_mapping, "cross_block_tables": captured.cross_block_table,
    }  # fmt: skip
    assert buffers.keys() == expected.keys()
    assert buffers["cross_slot_mapping"].shape == (0,)  # decodes run no encoder tokens
    assert all(np.shares_memory(buffers[name], one) for name, one in expected.items() if len(one))
    state.prepare_graph_input_buffers(buffers | {"input_ids": None}, metadata, True)
    assert captured.cross_block_table.tolist() == [[7, 8], [0, 0]]
    assert captured.encoder_seq_lens.tolist() == [6, 1]
    with pytest.raises(ValueError, match="input_buffers: 'block_tables' is not what get_graph_input_buffers gives"):
        state.prepare_graph_input_buffers(buffers | {"block_tables": None}, metadata, True)
    plain = CommonAttentionState(None, CommonMetadataBuilder(4, max_seq_len_to_capture=8))
    with plain.graph_capture(1):
        metadata = plain.graph_capture_get_metadata_for_batch(1)
        assert plain.get_graph_input_buffers(metadata).keys() == {"slot_mapping", "seq_lens_tensor", "block_tables"}


# ---- the documents

DOCS = pathlib.Path(__file__).parents[3] / "docs"


def test_the_snippets_of_the_page_run():
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", (DOCS / "list-builder-graphs.md").read_text(), re.DOTALL):
        exec(compile(snippet, "docs/list-builder-graphs.md", "exec"), names)
    assert names["state"].captured == (1, 2, 4, 8)


def test_the_contract_names_every_member_of_the_state():
    section = (DOCS / "contract.md").read_text().partition("### The state")[2].partition("## Versions")[0]
    table, _, aliases = section.partition("names of the first generation too:")
    members = {name for name in dir(CommonAttentionState) if not name.startswith("_")}
    first = {name for name in vars(FirstGenerationStateNames) if not name.startswith("_")}
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == members - first
    assert first <= set(re.findall(r"`(\w+)`", aliases))
