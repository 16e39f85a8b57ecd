"""The grid of blocks: which are filled, new in this step, owned, or passed by a window."""

import html
import pathlib
import re

import pytest

from attncore.builder import (
    CommonMetadataBuilder,
    ContextParallel,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    grid,
)

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "persistent-builder.md").read_text()
EVIL = "<script>alert(1)</script>' onload='x"


def rows(text):
    """The lines of a grid: request, tokens and cells of each row."""
    return [re.split(r"  +", line, maxsplit=3)[1:] for line in text.splitlines() if re.match(r"\d", line)]


def test_a_batch_and_its_step(kernels):
    batch = InputBatch(max_num_reqs=8, max_model_len=64, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    for name, blocks, computed in (("a", [1, 2, 3], 5), ("b", [4, 5, 6], 0), ("c", [7, 8, 9], 8), ("d", [10], 0)):
        batch.add_request(name, blocks, computed)
    batch.remove_request("b")
    assert rows(str(batch)) == [
        ["'a'", "5", "#/."],
        ["(empty)", "0"],
        ["'c'", "8", "##."],
        ["'d'", "0", "."],
    ]
    step = builder.build({"d": 3})
    assert rows(str(step)) == [["'a'", "5 + 1", "#+."], ["'c'", "8 + 1", "##+"], ["'d'", "0 + 3", "+"]]
    assert str(step).splitlines()[-1] == str(batch).splitlines()[-1] == grid.LEGEND


def test_blocks_that_moved_since_are_not_drawn():
    batch = InputBatch(max_num_reqs=8, max_model_len=64, block_size=4)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    batch.add_request("a", [1, 2], 5)
    step = builder.build()
    batch.preempt("a")
    assert rows(str(step)) == [["'a'", "5 + 1"]]


def test_windows_and_cross_groups():
    groups = [KVCacheGroup("window", 4, sliding_window=4), KVCacheGroup("cross", 4, cross=True)]
    batch = InputBatch(max_num_reqs=4, max_model_len=32, groups=groups, max_encoder_len=8)
    builder = MetadataBuilder(batch, max_num_batched_tokens=32)
    batch.add_request("a", {"window": [1, 2, 3, 4], "cross": [5, 6]}, 12, encoder_seq_len=6, encoder_computed=True)
    batch.release_passed_blocks()
    assert rows(str(batch)) == [["'a'", "12", "--#."], ["'a'", "6", "#/"]]
    step = builder.build()
    assert rows(str(step)) == [["'a'", "12 + 1", "--#+"]]
    assert rows(str(step.groups["cross"])) == [["'a'", "6", "#/"]]


def test_ranks_count_their_own_tokens():
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=8)
    batch.add_request("a", [5, 9, 2])
    builder = MetadataBuilder(batch, max_num_batched_tokens=32, context_parallel=ContextParallel(2, 0, block_size=4))
    assert rows(str(builder.build({"a": 10}))) == [["'a'", "0 + 5", "++."]]


def test_steps_of_the_list_builder():
    builder = CommonMetadataBuilder(4, "flash")
    prompt = SequenceGroup(True, [Sequence(0, 6, 0, [1, 2])])
    step = builder.build([prompt, SequenceGroup(False, [Sequence(1, 1, 9, [3, 4, 5])])])
    lines = str(step).splitlines()
    assert lines[2:4] == ["0    0 + 6", "1    9 + 1  ##+"]  # a plain prompt has no table


def test_a_windowed_decode_of_the_list_builder():
    """Its length is the window's, and so is its table."""
    builder = CommonMetadataBuilder(4, "flash", sliding_window=8)
    step = builder.build([SequenceGroup(False, [Sequence(0, 1, 20, [1, 2, 3, 4, 5, 6])])])
    length, width = int(step.seq_lens[0]), step.block_table.shape[1]
    assert length < 21
    cells = "#" * (-(-length // 4) - 1) + "+"
    assert len(cells) <= width
    assert str(step).splitlines()[-2] == f"0    {length - 1} + 1  {cells}"


def test_the_last_blocks_of_long_requests():
    batch = InputBatch(max_num_reqs=20, max_model_len=400, block_size=4)
    for index in range(20):
        batch.add_request(index, range(1, 101), 399)
    [first, *_] = rows(str(batch))
    before = 100 - grid.MOST_BLOCKS
    assert first == ["0", "399", f"({before} before) {'#' * (grid.MOST_BLOCKS - 1)}/"]
    assert f"... {20 - grid.MOST_ROWS} more rows" in str(batch)


@pytest.mark.parametrize("stepped", [False, True])
def test_html_escapes_names(stepped):
    batch = InputBatch(max_num_reqs=4, max_model_len=32, groups=[KVCacheGroup(EVIL, 4), KVCacheGroup("b", 4)])
    batch.add_request(EVIL, {EVIL: [1], "b": [2]}, 3)
    shown = MetadataBuilder(batch, max_num_batched_tokens=32).build() if stepped else batch
    markup = shown._repr_html_()
    assert "<script" not in markup
    assert "onload='" not in markup
    assert "&lt;scri" in markup
    assert not re.search(r"<(?!/?(table|thead|tbody|tr|th|td|span|pre|p)\b)", markup)


def test_html_has_a_square_for_each_block():
    batch = InputBatch(max_num_reqs=4, max_model_len=32, block_size=4)
    batch.add_request("a", [7, 8], 5)
    markup = batch._repr_html_()
    assert "column 0: block 7, filled" in markup
    assert "column 1: block 8, partly filled" in markup
    assert html.escape(repr(batch)) in markup


def test_the_page_shows_the_grid_of_its_snippet(monkeypatch):
    monkeypatch.delenv("ATTNCORE_KERNELS", raising=False)  # the default kernels
    shown = r"## What is in a batch\n.*?```python\n(.*?)```\n+```text\n(.*?)```"
    snippet, text = re.search(shown, PAGE, re.DOTALL).groups()
    printed = []
    names = {
        "InputBatch": InputBatch,
        "MetadataBuilder": MetadataBuilder,
        "print": lambda one: printed.append(str(one)),
    }
    exec(compile(snippet, "docs/persistent-builder.md", "exec"), names)
    assert "\n".join(printed) + "\n" == text
