"""The pictures of the documents, docs/images/*.svg. ``python tests/draw_pictures.py --write`` draws them anew."""

import pathlib
import sys

from pictures.arena import arena
from pictures.cache_block import cache_block
from pictures.engine import inside_vllm
from pictures.flow import flow
from pictures.negotiation import negotiation
from pictures.plots import metadata_by_size, served_step
from pictures.slots import table_and_slots

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"


def pictures():
    """Name of a file -> its text."""
    made = {
        "flow": flow, "cache-block": cache_block, "table-and-slots": table_and_slots, "arena": arena,
        "negotiation": negotiation, "metadata-by-size": metadata_by_size, "served-step": served_step,
        "inside-vllm": inside_vllm,
    }  # fmt: skip
    return {f"{name}.svg": draw().drawn() for name, draw in made.items()}


if __name__ == "__main__":
    for name, text in pictures().items():
        file = IMAGES / name
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        print(file.name)
        if "--write" in sys.argv[1:]:
            IMAGES.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
