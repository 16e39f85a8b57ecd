"""``attncore build --groups``, ``--speculative``, ``--context-parallel``: lines are steps of the persistent builder."""

import functools
import io
import json
import sys

import oracles
import pytest
from cli.changed_line import changed_line
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore.builder import KVCacheGroup
from attncore.cli import main
from attncore.json_lines.persistent_builder import StepOptions, build_step, parse_step

GROUPS = "full:4,window:8:2"
EXAMPLE = {
    "sequences": [
        {"seq_id": 7, "query_len": 4, "context_len": 6, "block_tables": {"full": [7, 3, 8], "window": [6, 3]}},
        {"seq_id": 5, "query_len": 1, "context_len": 9, "block_tables": {"full": [5, 9, 2], "window": [0, 7]}},
    ]
}
changed = functools.partial(changed_line, EXAMPLE)
SHARED = {
    "seq_ids": [5, 7], "num_decodes": 1, "num_decode_tokens": 1, "num_prefills": 1, "num_prefill_tokens": 4,
    "seq_lens": [10, 10], "context_lens": [9, 6], "query_lens": [1, 4], "query_start_loc": [0, 1, 5],
    "seq_start_loc": [0, 10, 20], "positions": [9, 6, 7, 8, 9], "token_to_req_indices": [0, 1, 1, 1, 1],
    "logits_indices": [0, 4], "max_query_len": 4, "max_seq_len": 10, "max_prefill_seq_len": 10,
    "max_decode_seq_len": 10, "max_decode_query_len": 1,
}  # fmt: skip
FULL = {
    "slot_mapping": [9, 14, 15, 32, 33], "block_tables": [[5, 9, 2], [7, 3, 8]], "paged_kv_indptr": [0, 3, 6],
    "paged_kv_indices": [5, 9, 2, 7, 3, 8], "paged_kv_last_page_len": [2, 2],
}  # fmt: skip
WINDOW = {
    "slot_mapping": [57, 54, 55, 24, 25], "block_tables": [[0, 7], [6, 3]], "paged_kv_indptr": [0, 2, 4],
    "paged_kv_indices": [0, 7, 6, 3], "paged_kv_last_page_len": [2, 2],
}  # fmt: skip


@pytest.fixture
def build(monkeypatch, capsys):
    """Runs the command over lines on standard input: (exit code, answers, text on standard error)."""

    def run(text, *arguments):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code = main(["build", *arguments])
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    return run


def test_groups_by_hand(build, kernels):
    code, [answer], err = build(json.dumps(EXAMPLE), "--groups", GROUPS, "--kernels", kernels)
    assert (code, err) == (0, "")
    expected = SHARED | {"groups": {"full": FULL, "window": WINDOW}}
    assert answer == expected
    assert list(answer) == list(expected)
    assert list(answer["groups"]["full"]) == list(FULL)


def one_group(line):
    sequences = [
        {name: value for name, value in one.items() if name != "block_tables"}
        | {"block_table": one["block_tables"]["full"]}
        for one in line["sequences"]
    ]
    return {"block_size": 4, "sequences": sequences}


def test_without_groups_the_fields_stand_together_and_drafts_make_decodes(build):
    _, [answer], _ = build(json.dumps(one_group(EXAMPLE)), "--speculative", "3")
    assert answer["seq_ids"] == [7, 5]  # both are decodes: no row moves
    assert (answer["num_decodes"], answer["num_decode_tokens"], answer["max_decode_query_len"]) == (2, 5, 4)
    assert answer["slot_mapping"] == [14, 15, 32, 33, 9]
    assert "groups" not in answer


def test_a_rank_s_worked_numbers(build, kernels):
    step = {
        "block_size": 4,
        "sequences": [
            {"seq_id": 0, "query_len": 10, "context_len": 0, "block_table": [5, 9, 2]},
            {"seq_id": 1, "query_len": 3, "context_len": 6, "block_table": [7, 3, 8]},
        ],
    }
    _, [answer], _ = build(json.dumps(step), "--context-parallel", "2:0", "--kernels", kernels)
    assert answer["slot_mapping"] == [20, -1, 21, -1, 22, -1, 23, -1, 36, -1, 31, -1, 12]
    assert (answer["seq_lens"], answer["context_lens"]) == ([5, 5], [0, 3])
    assert answer["block_tables"] == [[5, 9], [7, 3]]  # as wide as the longest needs: the third is for later
    _, [other], _ = build(json.dumps(step), "--context-parallel", "2:1")
    slots = zip(answer["slot_mapping"], other["slot_mapping"], strict=True)
    assert all((one < 0) != (two < 0) for one, two in slots)


@st.composite
def steps(draw):
    """A step of up to five requests, groups of any sizes, ranks, drafts; and the options for it."""
    world, drafts = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    count = draw(st.integers(1, 3))
    size = draw(st.sampled_from([1, 2, 4, 6]))
    sizes = [size if world > 1 else draw(st.sampled_from([1, 3, 4, 16])) for _ in range(count)]
    windows = [None if world > 1 else draw(st.sampled_from([None, 1, 5])) for _ in range(count)]
    interleave = draw(st.sampled_from([n for n in (1, 2, 3) if sizes[0] % n == 0])) if world > 1 else 1
    groups = tuple(KVCacheGroup(f"g{index}", sizes[index], sliding_window=windows[index]) for index in range(count))
    sequences, block = [], 1
    for seq_id in draw(st.permutations(range(draw(st.integers(1, 5))))):
        query_len, context_len = draw(st.integers(1, 8)), draw(st.integers(0, 30))
        tables = {}
        for group in groups:
            held = oracles.cdiv(context_len + query_len, group.block_size * world) + draw(st.integers(0, 2))
            tables[group.name] = list(range(block, block + held))
            if group.sliding_window:
                gone = max(0, context_len + 1 - group.sliding_window) // group.block_size
                tables[group.name][:gone] = [0] * gone
            block += held
        sequences.append({"seq_id": seq_id, "query_len": query_len, "context_len": context_len, "block_tables": tables})
    rank = draw(st.integers(0, world - 1))
    return {"sequences": sequences}, StepOptions(groups, 1 + drafts, world, rank, interleave)


@settings(max_examples=150, deadline=None)
@given(steps())
def test_any_step_is_what_the_oracle_says(step):
    line, options = step
    answer = build_step(parse_step(json.dumps(line), options), options)
    by_id = {sequence["seq_id"]: sequence for sequence in line["sequences"]}
    assert sorted(answer["seq_ids"]) == sorted(by_id)
    rows = [by_id[seq_id] for seq_id in answer["seq_ids"]]
    longest = max(row["context_len"] + row["query_len"] for row in rows)
    for group in options.groups:
        size = group.block_size
        of_group = [(row["block_tables"][group.name], row["context_len"], row["query_len"]) for row in rows]
        if options.world_size > 1:
            ranks = options.world_size, options.rank, options.interleave
            expected = oracles.rank_step(of_group, size, *ranks, options.decode_threshold)
        else:
            expected = oracles.persistent_step(of_group, size, options.decode_threshold)
        found = answer | answer["groups"][group.name]
        for name in found.keys() & expected.keys():
            assert found[name] == expected[name], name
        width = oracles.cdiv(longest, size * options.world_size)
        assert found["block_tables"] == [(blocks + [0] * width)[:width] for blocks, _, _ in of_group]
    kinds = [row["query_len"] <= options.decode_threshold for row in rows]
    assert kinds == sorted(kinds, reverse=True)


FIRST = "sequences.0"
BAD = [
    ("{", "batch: ends in the middle of a value"),
    ("[]", "batch: [] is not an object"),
    (changed("groups", []), "groups: unknown field; known: sequences"),
    (changed("block_size", 4), "block_size: unknown field; known: sequences"),
    (changed("sequences", ...), "sequences: missing"),
    (changed("sequences", []), "sequences: empty"),
    (changed("sequences", {}), "sequences: {} is not a list"),
    (changed(FIRST, 3), "sequences[0]: 3 is not an object"),
    (changed(f"{FIRST}.block_table", [1]), "sequences[0].block_table: unknown field"),
    (changed(f"{FIRST}.seq_id", "a"), 'sequences[0].seq_id: "a" is not an integer'),
    (changed(f"{FIRST}.seq_id", 5), "sequences[1].seq_id: 5 stands twice in one step"),
    (changed(f"{FIRST}.query_len", 0), "sequences[0].query_len: 0 is outside 1.."),
    (changed(f"{FIRST}.query_len", 2**31 - 1), "sequences[0].query_len: 2147483647 on top of context_len 6"),
    (changed(f"{FIRST}.context_len", True), "sequences[0].context_len: true is not an integer"),
    (changed(f"{FIRST}.block_tables", [7]), "sequences[0].block_tables: [7] is not an object"),
    (changed(f"{FIRST}.block_tables.window", ...), "sequences[0].block_tables.window: missing"),
    (changed(f"{FIRST}.block_tables.other", []), "sequences[0].block_tables.other: unknown field; known: full, window"),
    (changed(f"{FIRST}.block_tables.window", None), "sequences[0].block_tables.window: null is not a list"),
    (changed(f"{FIRST}.block_tables.full", [7, -3, 8]), "sequences[0].block_tables.full: block id -3 at index 1"),
    (changed(f"{FIRST}.block_tables.full", [7, 3.0, 8]), "sequences[0].block_tables.full: block id 3.0 at index 1"),
    (
        changed(f"{FIRST}.block_tables.window", [6]),
        "sequences[0].block_tables.window: sequence 7 holds 1 block but needs 2 for its 10 tokens (block_size 8)",
    ),
    (
        changed("sequences.1.block_tables.full", [5, 9, 0]),
        "sequences[1].block_tables.full: sequence 5 would write token 9 to block 0, the null block (index 2",
    ),
    (
        changed(f"{FIRST}.block_tables.full", [7, 3, 7]),
        "sequences[0].block_tables.full: block 7 stands at index 0 and again at 2; give each place its own",
    ),
    (
        changed("sequences.1.block_tables.full", [5, 0, 2]),
        "sequences[1].block_tables.full: block 0 at index 1, the null block, where no window has passed; give the",
    ),
    (
        changed("sequences.1.block_tables.full", [5, 9, 2]).replace("[0, 7]", "[0, 0, 7]"),
        "sequences[1].block_tables.window: sequence 5 would write token 9 to block 0",
    ),
    (json.dumps(EXAMPLE).replace('"seq_id": 7', '"seq_id": 7, "seq_id": 7'), "seq_id: stands twice in one object"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_the_first_bad_line_ends_the_run(build, line, message):
    code, answers, err = build("\n".join((json.dumps(EXAMPLE), line, json.dumps(EXAMPLE))), "--groups", GROUPS)
    assert (code, len(answers)) == (2, 1)
    assert err.startswith(f"line 2: {message}")
    assert err.count("\n") == 1


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_what_a_batch_refuses_is_named_by_its_field(data):
    """Tables of few ids, so that some stand twice: none of them is refused when its batch is made."""
    table = st.lists(st.integers(0, 5), min_size=3, max_size=4)
    sequences = [
        {
            "seq_id": index,
            "query_len": data.draw(st.integers(1, 4)),
            "context_len": data.draw(st.integers(0, 8)),
            "block_tables": {"full": data.draw(table), "window": data.draw(table)},
        }
        for index in range(2)
    ]
    options = StepOptions((KVCacheGroup("full", 4), KVCacheGroup("window", 8, sliding_window=2)))
    refused = ""
    try:
        step = parse_step(json.dumps({"sequences": sequences}), options)
    except ValueError as error:
        refused = str(error)
    if not refused:
        build_step(step, options)
    assert not refused or refused.startswith("sequences[")


def test_lines_of_the_other_builder_are_refused_with_the_options_that_read_them(build):
    step, of_one_group = json.dumps(EXAMPLE), json.dumps(one_group(EXAMPLE))
    batch = json.dumps({"block_size": 4, "groups": []})
    for line in (step, of_one_group):
        err = build(line)[2]
        assert err.startswith(
            "line 1: sequences: stand in steps of the persistent builder, which are read with --groups"
        )
    for options in (["--groups", GROUPS], ["--speculative", "1"]):
        assert build(batch, *options)[2].startswith(
            "line 1: groups: stand in batches of the list builder, which are read"
        )
    assert build(step, "--speculative", "1")[2].startswith("line 1: block_size: missing; without --groups each step")


def test_lines_far_smaller_than_their_answers(build):
    huge = {"seq_id": 1, "query_len": 2**31 - 1, "context_len": 0, "block_table": [1]}
    assert build(json.dumps({"block_size": 2**31 - 1, "sequences": [huge]}), "--speculative", "1")[2].startswith(
        "line 1: sequences: an answer of 2147483647 tokens and tables of 1 x 1 blocks is too large"
    )
    twice = [huge, huge | {"seq_id": 2}]
    assert build(json.dumps({"block_size": 2**31 - 1, "sequences": twice}), "--speculative", "1")[2].startswith(
        "line 1: sequences: their lengths do not fit int32 in all"
    )
    many = {"block_size": 2**30, "sequences": [huge | {"block_table": [1, 2]}]}
    assert build(json.dumps(many), "--speculative", "1")[2].startswith(
        "line 1: sequences[0].block_table: 2 blocks of 1073741824 tokens do not fit int32"
    )


def test_a_block_size_that_ranks_cannot_share(build):
    line = json.dumps(one_group(EXAMPLE))
    assert build(line, "--context-parallel", "2:0:3")[2].startswith("line 1: block_size: 4 cannot be shared out 3 tok")
    line = json.dumps(one_group(EXAMPLE) | {"block_size": 2**30})
    assert build(line, "--context-parallel", "2:0")[2].startswith("line 1: block_size: 1073741824 on 2 ranks does not")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--groups", GROUPS, "--layout", "flash"], "--layout: flash given beside --groups"),
        (["--groups", GROUPS, "--context-parallel", "2:0"], "--context-parallel: group 'window' of --groups has a sli"),
        (["--groups", "a:4,b:8", "--context-parallel", "2:0"], "--context-parallel: groups 'a' and 'b' of --groups"),
        (["--groups", "a:4", "--context-parallel", "2:0:3"], "--context-parallel: INTERLEAVE 3 does not divide the b"),
        (["--groups", "a"], "--groups: 'a' is not NAME:BLOCK_SIZE or NAME:BLOCK_SIZE:WINDOW"),
        (["--groups", "a:0"], "--groups: block size of a 0 is not between 1 and"),
        (["--groups", "a:4:x"], "--groups: window of a 'x' is not a whole number"),
        (["--groups", "a:4,a:8"], "--groups: groups[1].name: 'a' stands twice"),
        (["--speculative", "0"], "--speculative: K 0 is not between 1 and 1023"),
        (["--context-parallel", "2"], "--context-parallel: '2' is not WORLD:RANK or WORLD:RANK:INTERLEAVE"),
        (["--context-parallel", "2:2"], "--context-parallel: RANK 2 is not between 0 and 1"),
    ],
)
def test_a_bad_option_is_one_line(build, words, message):
    code, answers, err = build(json.dumps(EXAMPLE), *words)
    assert (code, answers) == (2, [])
    assert err.startswith(f"attncore: error: {message}")
    assert err.count("\n") == 1
