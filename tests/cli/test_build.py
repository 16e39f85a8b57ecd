"""``attncore build``: line by line, and what it refuses."""

import functools
import gzip
import io
import json
import subprocess
import sys

import pytest
from cli.changed_line import changed_line

from attncore.cli import main
from attncore.how_to_install import install_extra

EXAMPLE = {
    "block_size": 4,
    "sliding_window": None,
    "chunked_prefill": True,
    "graph_batch_size": None,
    "max_seq_len_to_capture": 64,
    "groups": [
        {
            "is_prompt": True,
            "prefix_cache_hit": False,
            "sequences": [{"seq_id": 0, "query_len": 5, "context_len": 3, "block_table": [4, 6]}],
        },
        {
            "is_prompt": False,
            "sequences": [{"seq_id": 1, "query_len": 1, "context_len": 8, "block_table": [9, 2, 7]}],
        },
        {"is_prompt": False, "sequences": [{"seq_id": 2, "query_len": 1, "context_len": 3, "block_table": [5]}]},
    ],
}
changed = functools.partial(changed_line, EXAMPLE)
ANSWER = {
    "num_prefills": 1, "num_prefill_tokens": 5, "num_decode_tokens": 2,
    "slot_mapping": [19, 24, 25, 26, 27, 28, 23], "seq_lens": [8, 9, 4], "context_lens": [3, 8, 3],
    "query_start_loc": [0, 5, 6, 7], "seq_start_loc": [0, 8, 17, 21],
    "block_tables": [[4, 6, 0], [9, 2, 7], [5, 0, 0]], "max_query_len": 5, "max_prefill_seq_len": 8,
    "max_decode_seq_len": 9, "use_cuda_graph": False,
}  # fmt: skip
PAGES = {
    "paged_kv_indptr": [0, 2, 5, 6],
    "paged_kv_indices": [4, 6, 9, 2, 7, 5],
    "paged_kv_last_page_len": [4, 1, 4],
}
ADDED = {"common": {}, "rocm": {}, "flash": {"max_decode_query_len": 1}, "flashinfer": PAGES}


@pytest.fixture
def build(monkeypatch, capsys):
    """Runs the command over bytes on standard input: (exit code, lines of output, text on standard error)."""

    def run(text, *arguments):
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = main(["build", *arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


@pytest.mark.parametrize("layout", ADDED)
def test_the_documented_answer(build, kernels, layout):
    code, lines, err = build(json.dumps(EXAMPLE), "--layout", layout, "--kernels", kernels)
    assert (code, err) == (0, "")
    assert [json.loads(line) for line in lines] == [ANSWER | ADDED[layout]]
    assert list(json.loads(lines[0])) == list(ANSWER | ADDED[layout])  # the documented order too


def test_a_file_and_blank_lines(build, tmp_path, capsys):
    path = tmp_path / "batches.jsonl"
    path.write_text(f"{json.dumps(EXAMPLE)}\n\n{json.dumps(EXAMPLE)}\r\n")
    assert main(["build", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert len(build(json.dumps(EXAMPLE), "-")[1]) == 1


def test_a_profiling_run(build):
    groups = [{"is_prompt": True, "sequences": [{"seq_id": 0, "query_len": 3, "context_len": 0, "block_table": None}]}]
    _, lines, _ = build(json.dumps({"block_size": 4, "groups": groups}), "--layout", "flashinfer")
    answer = json.loads(lines[0])
    assert answer["slot_mapping"] == [-1, -1, -1]
    assert answer["block_tables"] == [[]]
    assert answer["paged_kv_indptr"] == [0, 0]


def of_encoders(*encoders):
    """The example's groups with an encoder each: (length, cross table)."""
    batch = json.loads(json.dumps(EXAMPLE))
    for group, (length, table) in zip(batch["groups"], encoders, strict=True):
        group |= {"encoder_seq_len": length, "cross_block_table": table}
    return batch


ENCODERS = of_encoders((6, [7, 9]), (3, [4]), (0, []))


@pytest.mark.parametrize("layout", ["common", "flash", "rocm"])
def test_groups_with_encoders(build, kernels, layout):
    _, lines, err = build(json.dumps(ENCODERS), "--layout", layout, "--kernels", kernels)
    assert err == ""
    expected = ANSWER | ADDED[layout] | {
        "encoder_seq_lens": [6, 3, 0], "num_encoder_tokens": 9, "max_encoder_seq_len": 6,
        "encoder_seq_start_loc": [0, 6, 9, 9], "cross_slot_mapping": [28, 29, 30, 31, 36, 37],
        "cross_block_tables": [[0], [4], [0]],
    }  # fmt: skip
    assert json.loads(lines[0]) == expected
    assert list(json.loads(lines[0])) == list(expected)


def test_a_graph_batch_with_encoders(build):
    batch = ENCODERS | {"groups": ENCODERS["groups"][1:], "graph_batch_size": 3, "max_seq_len_to_capture": 12}
    answer = json.loads(build(json.dumps(batch))[1][0])
    assert answer["cross_block_tables"] == [[4, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert (answer["encoder_seq_lens"], answer["cross_slot_mapping"]) == ([3, 0, 1], [])


def test_fields_of_encoders_that_are_null_are_no_encoders(build):
    batch = of_encoders((None, None), (None, None), (None, None))
    del batch["groups"][1]["cross_block_table"]
    for layout, added in ADDED.items():
        assert json.loads(build(json.dumps(batch), "--layout", layout)[1][0]) == ANSWER | added


def test_lines_with_and_without_encoders_take_turns(build):
    lines = build("\n".join(json.dumps(batch) for batch in (EXAMPLE, ENCODERS, EXAMPLE)))[1]
    assert ["num_encoder_tokens" in json.loads(line) for line in lines] == [False, True, False]
    assert lines[0] == lines[2]


@pytest.mark.parametrize(
    ("encoders", "message"),
    [
        (
            [(6, [7, 9]), (3, [4]), (None, None)],
            "groups[2].encoder_seq_len: missing; every group of an encoder/decoder",
        ),
        ([(None, None), (3, [4]), (0, [])], "groups[0].encoder_seq_len: missing; every group"),
        ([(None, [7]), (3, [4]), (0, [])], "groups[0].encoder_seq_len: missing, but cross_block_table is given"),
        ([(6, None), (3, [4]), (0, [])], "groups[0].cross_block_table: missing; blocks are needed for 6 encoder"),
        (
            [(9, [7, 9]), (3, [4]), (0, [])],
            "groups[0].cross_block_table: sequence 0 holds 2 blocks but needs 3 for its 9 encoder tokens",
        ),
        ([("6", [7, 9]), (3, [4]), (0, [])], 'groups[0].encoder_seq_len: "6" is not an integer'),
        ([(6.0, [7, 9]), (3, [4]), (0, [])], "groups[0].encoder_seq_len: 6.0 is not an integer"),
        ([(-6, [7, 9]), (3, [4]), (0, [])], "groups[0].encoder_seq_len: -6 is outside 0..2147483647"),
        ([(6, [7, 9]), (3, 4), (0, [])], "groups[1].cross_block_table: 4 is neither a list nor null"),
        ([(6, [7, 9]), (3, "4"), (0, [])], 'groups[1].cross_block_table: "4" is neither a list nor null'),
        ([(6, [7, 9]), (3, {"4": 4}), (0, [])], 'groups[1].cross_block_table: {"4": 4} is neither a list nor null'),
        (
            [(6, [7, True]), (3, [4]), (0, [])],
            "groups[0].cross_block_table: block id True at index 1 is not an integer",
        ),
    ],
)
def test_a_bad_encoder_names_its_field(build, encoders, message):
    code, lines, err = build(json.dumps(of_encoders(*encoders)))
    assert (code, lines) == (2, [])
    assert err.startswith(f"line 1: {message}")
    assert err.count("\n") == 1


def test_a_layout_without_cross_attention_says_so(build):
    assert build(json.dumps(ENCODERS), "--layout", "flashinfer")[2].startswith("line 1: layout: flashinfer has no enc")


def test_an_encoder_field_that_stands_twice(build):
    line = json.dumps(ENCODERS).replace('"encoder_seq_len": 6', '"encoder_seq_len": 6, "encoder_seq_len": 6')
    assert build(line)[2].startswith("line 1: encoder_seq_len: stands twice in one object")


def test_encoders_far_larger_than_their_line(build):
    groups = [EXAMPLE["groups"][0] | {"sequences": [EXAMPLE["groups"][0]["sequences"][0] | {"block_table": None}]}]
    batch = EXAMPLE | {"groups": [groups[0] | {"encoder_seq_len": 2**31 - 1}]}
    assert build(json.dumps(batch))[2].startswith(
        "line 1: groups: 2147483647 encoder tokens and cross tables 0 wide are"
    )
    graph = {"groups": ENCODERS["groups"][2:], "graph_batch_size": 2, "max_seq_len_to_capture": 2**31 - 1}
    assert build(json.dumps(ENCODERS | graph))[2].startswith(
        "line 1: groups: an answer of 2 tokens and a table of 2 x 5"
    )


def test_a_graph_batch(build):
    batch = json.loads(changed("groups", EXAMPLE["groups"][1:]))
    batch |= {"graph_batch_size": 3, "max_seq_len_to_capture": 12}
    answer = json.loads(build(json.dumps(batch))[1][0])
    assert answer["use_cuda_graph"]
    assert answer["block_tables"] == [[9, 2, 7], [5, 0, 0], [0, 0, 0]]
    code, out, err = build(json.dumps(batch | {"graph_batch_size": 2**31 - 1}))
    assert (code, out) == (2, [])
    assert err == "line 1: graph_batch_size: 2147483645 padded requests do not fit int32\n"


def test_max_seq_len_to_capture_is_read_only_with_a_graph(build):
    assert build(changed("max_seq_len_to_capture", "not read"))[0] == 0


BAD = [
    (b"\xef\xbb\xbf{}", "batch: begins with a byte order mark"),
    (json.dumps(EXAMPLE).encode("utf-16"), "batch: is not UTF-8"),
    (changed("block_size", 0).replace('"block_size": 0', '"block_size": ' + "9" * 5000), "batch: holds an integer of"),
    (changed("groups", 0).replace("0}", "[" * 900 + "]" * 900 + "}"), "groups[0]: "),
    (changed("block_size", 4).replace("{", '{"block_size": 4, ', 1), "block_size: stands twice in one object"),
    (changed("", 4), '"": unknown field'),
    (changed("\x1b[31m", 4), '"\\u001b[31m": unknown field'),
    (
        changed("groups.0.sequences.0", {"seq_id": 0, "query_len": 2**31 - 100, "context_len": 0, "block_table": None}),
        "groups: an answer of 2147483550 tokens",
    ),
    ("{", "batch: ends in the middle of a value, at column 1: it may be cut"),
    ("[1]", "batch: [1] is not an object"),
    ("null", "batch: null is not an object"),
    (b"\xff\xfe", "batch: is not UTF-8"),
    ("\x00", r"batch: is not JSON: expected a value, found '\x00' at column 1"),
    ("[" * 100_000, "batch: is nested too deeply to be read"),
    ('{"block_size": NaN}', "batch: is not JSON: NaN is no number"),
    (json.dumps(EXAMPLE)[:-40], "batch: ends in the middle of a value, at column"),
    ('{"block_size": 4, "gro\n', "batch: ends in the middle of a value, at column 22: it may be cut"),
    (changed("block_size", ...), "block_size: missing"),
    (changed("block_size", True), "block_size: true is not an integer"),
    (changed("block_size", 4.0), "block_size: 4.0 is not an integer"),
    (changed("block_size", "4"), 'block_size: "4" is not an integer'),
    (changed("block_size", 0), "block_size: 0 is outside 1.."),
    (changed("block_size", 2**31), "block_size: 2147483648 is outside 1..2147483647"),
    (changed("groups", ...), "groups: missing"),
    (changed("groups", []), "groups: empty"),
    (changed("groups", {}), "groups: {} is not a list"),
    (changed("blocksize", 4), "blocksize: unknown field"),
    (changed("sliding_window", 0), "sliding_window: 0 is outside 1.."),
    (changed("chunked_prefill", 1), "chunked_prefill: 1 is not true or false"),
    (changed("chunked_prefill", "true"), 'chunked_prefill: "true" is not true or false'),
    (changed("chunked_prefill", False), "chunked_prefill: false, but groups[0].sequences[0]"),
    (changed("graph_batch_size", 2), "graph_batch_size: 2 is below the 3 sequences"),
    (changed("graph_batch_size", 3), "graph_batch_size: a graph batch holds decodes only"),
    (changed("groups.0.is_prompt", ...), "groups[0].is_prompt: missing"),
    (changed("groups.0.is_prompt", "false"), 'groups[0].is_prompt: "false" is not true or false'),
    (changed("groups.0.prefix_cache_hit", None), "groups[0].prefix_cache_hit: null is not true or false"),
    (changed("groups.1.prefix_cache_hit", True), "groups[1].prefix_cache_hit: true on a decode"),
    (changed("groups.2.is_prompt", True), "groups[2].is_prompt: a prompt after a decode"),
    (changed("groups.0.sequences", []), "groups[0].sequences: empty"),
    (changed("groups.0.extra", 1), "groups[0].extra: unknown field"),
    (changed("groups.0.sequences.0", 3), "groups[0].sequences[0]: 3 is not an object"),
    (changed("groups.0.sequences.0.seq_id", ...), "groups[0].sequences[0].seq_id: missing"),
    (changed("groups.0.sequences.0.block_table", ...), "groups[0].sequences[0].block_table: missing"),
    (changed("groups.0.sequences.0.block_table", 4), "groups[0].sequences[0].block_table: 4 is neither"),
    (
        changed("groups.0.sequences.0.block_table", [4, -6]),
        "groups[0].sequences[0].block_table: block id -6 at index 1",
    ),
    (
        changed("groups.0.sequences.0.block_table", [4, 1e3]),
        "groups[0].sequences[0].block_table: block id 1000.0 at index 1 is not an integer",
    ),
    (
        changed("groups.0.sequences.0.block_table", [4]),
        "groups[0].sequences[0].block_table: sequence 0 holds 1 block but needs 2",
    ),
    (changed("groups.0.sequences.0.query_len", 0), "groups[0].sequences[0].query_len: 0 is outside 1.."),
    (changed("groups.0.sequences.0.context_len", -1), "groups[0].sequences[0].context_len: -1 is outside 0.."),
    (changed("groups.1.sequences.0.query_len", 2), "groups[1].sequences[0].query_len: 2 on a decode"),
    (
        changed("groups.0.sequences", [EXAMPLE["groups"][0]["sequences"][0]] * 2),
        "groups[0].sequences[1].seq_id: 0 stands twice",
    ),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_the_first_bad_line_ends_the_run(build, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    good = json.dumps(EXAMPLE).encode()
    code, lines, err = build(good + b"\n" + line + b"\n" + good)
    assert code == 2
    assert len(lines) == 1  # what came before is answered, what comes after is not
    assert err.startswith(f"line 2: {message}")
    assert err.count("\n") == 1


def test_a_graph_without_a_length_to_capture(build):
    batch = json.loads(changed("graph_batch_size", 4))
    del batch["max_seq_len_to_capture"]
    assert build(json.dumps(batch))[2].startswith("line 1: max_seq_len_to_capture: missing; graph_batch_size needs it")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layot", "flash"], "unrecognized arguments: --layot; did you mean --layout?"),
        (["--spekulative=3"], "unrecognized arguments: --spekulative=3; did you mean --speculative?"),
        (["-", "--verbose"], "unrecognized arguments: --verbose; attncore build --help lists the options"),
        (["--layout", "flsh"], "--layout: invalid choice: 'flsh'"),
        (["--kernels", "c"], "--kernels: invalid choice: 'c'"),
        (["-", "--kernels"], "--kernels: no value given"),
        (["no-such-file"], "no-such-file cannot be read: No such file or directory"),
        (["/"], "/ cannot be read: Is a directory"),
    ],
)
def test_a_bad_argument_is_one_line(build, arguments, message):
    code, lines, err = build("", *arguments)
    assert (code, lines) == (2, [])
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("closed", "code"), [("<&-", 2), (">&-", 2), ("2>&-", 0)])
def test_a_closed_stream_is_no_traceback(tmp_path, closed, code):
    (tmp_path / "batch.jsonl").write_text(json.dumps(EXAMPLE))
    words = f"{sys.executable} -m attncore build {'' if closed == '<&-' else 'batch.jsonl'} {closed}"
    done = subprocess.run(["sh", "-c", words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_a_bad_choice_of_kernels_is_no_fault_of_a_line(build, monkeypatch):
    monkeypatch.setenv("ATTNCORE_KERNELS", "rust")
    code, _, err = build(json.dumps(EXAMPLE))
    assert (code, err) == (2, "attncore: error: ATTNCORE_KERNELS: 'rust' is neither cython nor numba\n")


def test_kernels_that_are_not_installed_are_one_line(build, monkeypatch):
    monkeypatch.setitem(sys.modules, "attncore.kernels.numba", None)
    code, _, err = build(json.dumps(EXAMPLE), "--kernels", "numba")
    assert code == 2
    assert err.startswith("attncore: error: kernels: numba was asked for and cannot be imported")
    assert err.endswith(f"; {install_extra('numba')}\n")


def test_an_empty_input_is_an_error(build):
    code, _, err = build("\n\n")
    assert code == 2
    assert "empty" in err


def test_a_gzipped_input_is_said_with_what_unpacks_it(build, tmp_path, capsys):
    path = tmp_path / "the steps.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(EXAMPLE).encode()))
    assert main(["build", str(path)]) == 2
    said = f"{path} is gzipped; unpack it: gzip -dc '{path}' | attncore build -"
    assert capsys.readouterr() == ("", f"attncore: error: {said}\n")


def test_an_answer_comes_before_the_next_question():
    """A program at the other end of a pipe may wait for each answer."""
    command = [sys.executable, "-m", "attncore", "build"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(2):
            process.stdin.write(json.dumps(EXAMPLE) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == ANSWER
        process.stdin.close()
        assert process.wait(10) == 0
