"""``attncore build`` over groups with placeholders: the maps of a line, and the sentences for bad ones."""

import json

import pytest

from attncore.cli import main
from attncore.json_lines.list_builder import build_batch, parse_batch

IMAGES = [{"offset": 2, "length": 6}, {"offset": 9, "length": 2}]


def line(placeholders, query_len=12, context_len=0, **more):
    """A prompt of text alone before one that has placeholders."""
    text = {"is_prompt": True, "sequences": [{"seq_id": 0, "query_len": 3, "context_len": 0, "block_table": [9]}]}
    one = {"seq_id": 1, "query_len": query_len, "context_len": context_len, "block_table": [1, 2, 3, 4, 5]}
    group = {"is_prompt": True, "sequences": [one], "placeholders": placeholders, **more}
    return json.dumps({"block_size": 4, "chunked_prefill": True, "groups": [text, group]})


def answer(text, layout="common"):
    return build_batch(parse_batch(text), layout)


@pytest.mark.parametrize("layout", ["common", "flash", "flashinfer", "rocm"])
def test_a_line_has_the_rows_of_each_modality(layout):
    audio = [{"offset": 0, "length": 1, "item": 4}, {"offset": 11, "length": 1, "item": 4, "embedding_start": 1}]
    found = answer(line({"image": IMAGES, "audio": audio}), layout)
    assert found["multi_modal_placeholder_index_maps"] == {
        "image": {"src": list(range(8)), "dest": [5, 6, 7, 8, 9, 10, 12, 13]},
        "audio": {"src": [0, 1], "dest": [3, 14]},
    }
    without = answer(line(None), layout)
    assert {name: found[name] for name in without} == without
    assert "multi_modal_placeholder_index_maps" not in without


@pytest.mark.parametrize(
    ("query_len", "context_len", "src", "dest"),
    [
        (4, 0, [0, 1], [5, 6]),  # the first chunk
        (4, 4, [2, 3, 4, 5], [3, 4, 5, 6]),
        (3, 8, [0, 1], [4, 5]),  # behind the first image: rows are those of the second alone
        (4, 12, [], []),
    ],
)
@pytest.mark.parametrize("hit", [False, True])
def test_chunks_and_prefix_hits(query_len, context_len, src, dest, hit):
    more = {"prefix_cache_hit": True} if hit else {}
    found = answer(line({"image": IMAGES}, query_len, context_len, **more))
    assert found["multi_modal_placeholder_index_maps"] == {"image": {"src": src, "dest": dest}}


@pytest.mark.parametrize(
    ("placeholders", "says"),
    [
        ([], "groups[1].placeholders: [] is not an object with a list for each modality"),
        ("image", 'groups[1].placeholders: "image" is not an object'),
        ({"image": 3}, "groups[1].placeholders.image: 3 is not a list"),
        ({"an image": [3]}, 'groups[1].placeholders["an image"][0]: 3 is not an object'),
        ({"image": [{"offset": 1}]}, "groups[1].placeholders.image[0].length: missing"),
        ({"image": [{"offset": 1, "length": 2, "rows": 3}]}, "groups[1].placeholders.image[0].rows: unknown field"),
        ({"image": [{"offset": -1, "length": 2}]}, "groups[1].placeholders.image[0].offset: -1 is outside 0.."),
        ({"image": [{"offset": 1, "length": 0}]}, "groups[1].placeholders.image[0].length: 0 is outside 1.."),
        ({"image": [{"offset": 1.5, "length": 1}]}, "groups[1].placeholders.image[0].offset: 1.5 is not an integer"),
        ({"image": [{"offset": 1, "length": 2, "item": "a"}]}, "groups[1].placeholders.image[0].item: "),
        (
            {"image": [*IMAGES, {"offset": 4, "length": 1}]},
            "groups[1].placeholders['image']: items 0 and 2 both take token 4; ranges of a request may not overlap",
        ),
        (
            {"image": IMAGES, "audio": [{"offset": 10, "length": 1}]},
            "groups[1].placeholders: image and audio both take token 10; a token takes one embedding",
        ),
    ],
    ids=str,
)
def test_bad_placeholders_are_one_line(placeholders, says, monkeypatch, capsys, tmp_path):
    file = tmp_path / "lines"
    file.write_text(line(placeholders) + "\n")
    assert main(["build", str(file)]) != 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"line 1: {says}" in err
    assert err.count("\n") == 1


def test_a_modality_that_stands_twice_is_refused():
    twice = line({"image": IMAGES}).replace('"image": [', '"image": [], "image": [')
    with pytest.raises(ValueError, match=r"^image: stands twice in one object"):
        parse_batch(twice)


def test_an_answer_is_counted_before_memory_is_taken_for_it():
    """Two numbers for each token: a line of 150 bytes took 3.3 GB."""
    sequences = [{"seq_id": 0, "query_len": 900, "context_len": 0, "block_table": None}]
    group = {"is_prompt": True, "sequences": sequences, "placeholders": {"image": [{"offset": 0, "length": 900}]}}
    batch = parse_batch(json.dumps({"block_size": 4, "groups": [group]}))
    with pytest.raises(ValueError, match=r"^groups: 900 tokens of placeholders, with two numbers each, are more than"):
        build_batch(batch, max_answer=4096)
    with pytest.raises(ValueError, match=r"^answer: .* bytes are longer than 5500"):
        build_batch(batch, max_answer=5500)
    answer = build_batch(batch, max_answer=20000)["multi_modal_placeholder_index_maps"]
    assert answer == {"image": {"src": list(range(900)), "dest": list(range(900))}}


def test_letters_of_a_modality_count_as_they_are_written():
    name = "\N{GRINNING FACE}" * 100
    text = line({name: [{"offset": 0, "length": 1}]})
    whole = len(json.dumps(answer(text)))
    assert build_batch(parse_batch(text), max_answer=whole)
    with pytest.raises(ValueError, match=rf"^answer: {whole} bytes are longer than {whole - 1}"):
        build_batch(parse_batch(text), max_answer=whole - 1)
    with pytest.raises(ValueError, match=r"^groups\[1\]\.placeholders\[\"x{9,200}\.\.\.\]\[0\]\.length: missing$"):
        parse_batch(line({"x" * 10**5: [{"offset": 1}]}))
