"""docs/building-blocks.md: its snippets run, and it names every building block."""

import pathlib
import re

from attncore import builder

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "building-blocks.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

# Described with the builders or in port-from-v0.md, or the type of what a function of the page returns.
ELSEWHERE = {
    "BatchSlice", "Cascade", "CascadePass", "CommonAttentionMetadata", "CommonMetadataBuilder", "ContextChunks",
    "DecodePrefillSplit", "KVCacheGroup", "PlaceholderMap", "PlaceholderRun", "Sequence", "SequenceGroup",
    "SharedPrefix", "StateChunks", "StateGroup", "ThreeWaySplit", "VirtualBatch", "get_seq_len_block_table_args",
    "is_all_cross_attn_metadata_set", "is_all_encoder_attn_metadata_set",
}  # fmt: skip


def test_the_snippets_run_from_top_to_bottom():
    names = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "docs/building-blocks.md", "exec"), names)
    assert "other" in names


def test_the_page_names_every_building_block():
    named = {name for name in builder.__all__ if re.search(rf"\b{name}\b", PAGE)}
    assert set(builder.__all__) - named <= ELSEWHERE
    assert all(name in builder.__all__ for name in ELSEWHERE)
