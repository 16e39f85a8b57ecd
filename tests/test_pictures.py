"""docs/images is what tests/draw_pictures.py draws, and the documents show all of it."""

import pathlib
import re
from xml.etree import ElementTree

import draw_pictures
import pytest
from pictures import engine, negotiation, slots
from pictures.svg import Picture

import attncore
from attncore.registry.plugins.load import registry

ROOT = pathlib.Path(__file__).parents[1]
DRAWN = draw_pictures.pictures()
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", DRAWN)
def test_the_committed_file_is_what_is_drawn(name):
    file = draw_pictures.IMAGES / name
    assert file.read_text(encoding="utf-8") == DRAWN[name], "run: python tests/draw_pictures.py --write"


def test_every_file_is_drawn():
    assert {file.name for file in draw_pictures.IMAGES.iterdir()} == set(DRAWN)


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_can_be_read_to_those_who_do_not_see_it(name):
    root = ElementTree.fromstring(DRAWN[name])
    assert root.get("role") == "img"
    assert len(root.find(f"{SVG}title").text) > 20
    assert len(root.find(f"{SVG}desc").text) > 100


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_small_loads_nothing_and_has_text_as_text(name):
    text = DRAWN[name]
    assert len(text) < 20_000
    assert len(ElementTree.fromstring(text).findall(f".//{SVG}text")) > 10
    assert not re.search(r"<script|<image|@import|url\(|href", text)


def test_every_picture_is_shown_with_a_text_that_stands_for_it():
    shown = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            assert len(alt) > 40, f"{page.name}: {target}: say in its brackets what the picture shows"
            shown.add(pathlib.Path(target).name)
    assert shown == set(DRAWN)


def test_a_text_without_room_is_an_error():
    drawn = Picture(100, 50, "", "")
    with pytest.raises(ValueError, match="takes"):
        drawn.box(0, 0, 40, 20, ["too long for this"])
    with pytest.raises(ValueError, match="takes"):
        drawn.text(60, 10, "too long for this")


def test_the_example_of_slots_is_right():
    assert slots.slots() == [slots.TABLE[i // slots.SIZE] * slots.SIZE + i % slots.SIZE for i in range(6, 10)]


def test_the_example_of_negotiation_is_what_select_says():
    loaded = {record.name for record in registry().records if record.spec is not None}
    if missing := {name for name, *_ in negotiation.CANDIDATES} - loaded:
        pytest.skip(f"the picture shows plugins that are not installed here: {', '.join(sorted(missing))}")
    packages = {"torch": "2.11.0", "flashinfer-python": "0.7.2.post1", "triton": "3.6.0"}
    host = attncore.Host.assume("sm_90", packages=packages)
    choice = attncore.select(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", host=host)
    text = choice.explain()
    for name, state, why, _ in negotiation.CANDIDATES:
        codes = {reason.code for reason in choice.reasons.get(name, ())}
        assert codes == ({why.partition(":")[0]} if state == "not usable" else set()), name
        assert codes or why in text
    assert (choice.name, choice.block_size, choice.kv_cache_layout) == ("flashinfer", 16, "NHD")


def test_the_figures_of_the_run_inside_vllm_are_those_of_the_documents():
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    builds = engine.builds(engine.run())
    rows = re.findall(r"^\| (\d+) \| (eager|FULL_DECODE_ONLY) \|.*\| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for size, mode, theirs, ours in rows:
        drawn = [builds[name, mode][int(size)] for name in ("FLASHINFER", "ATTNCORE_FLASHINFER")]
        assert [theirs, ours] == [f"{us:.0f}" for us in drawn]
    figures = [
        f"{edge(builds[name, mode].values()):.0f}"
        for name, *_ in engine.BACKENDS
        for mode, _ in engine.MODES
        for edge in (min, max)
    ]
    for text in (page, (ROOT / "README.md").read_text(encoding="utf-8")):
        alt = re.search(r"!\[([^]]*)\]\([\w/]*inside-vllm\.svg\)", text)[1]
        assert re.findall(r"\b\d{2,3}\b(?!\.\d)", alt.partition(":")[2]) == figures
