"""An arena and its journal, and what a device does with them."""

from pictures.svg import Picture


def arena():
    drawn = Picture(
        640, 404, "An arena, its journal, and the receipt",
        "On the host, pinned memory holds an arena for each of several steps. An arena has a header with the "
        "number of the step, the fields that are sent, the journal of new block ids, and fields that stay on the "
        "host. One read or one copy brings header, fields and journal to the arena on the device. The journal's "
        "pairs of index and block id are written into the block table on the device. Then the step's number is "
        "written to the receipt on the host, and the arena may be used again.",
    )  # fmt: skip
    drawn.rect(12, 30, 616, 164, "paper edge")
    drawn.text(20, 22, "host, pinned memory", "bold")
    for y, step in ((44, "step 8"), (112, "step 7")):
        drawn.text(24, y + 30, step, size=12)
        drawn.box(80, y, 76, 50, ["header", "number"], "blue")
        drawn.box(156, y, 158, 50, ["fields", "slots, lengths, ..."], "blue")
        drawn.box(314, y, 130, 50, ["journal", "(index, block)"], "orange")
        drawn.box(444, y, 116, 50, ["other fields", "host only"])
    drawn.line((80, 166), (80, 174), (444, 174), (444, 166))
    drawn.text(454, 181, "one read, or one copy", "muted", size=12)
    drawn.rect(12, 240, 616, 152, "paper edge")
    drawn.text(20, 232, "device", "bold")
    drawn.arrow((235, 174), (235, 256))
    drawn.box(80, 256, 76, 50, ["header", "number"], "blue")
    drawn.box(156, 256, 158, 50, ["fields", "fixed addresses"], "blue")
    drawn.arrow((379, 174), (379, 256))
    drawn.box(346, 256, 200, 50, ["block table", "journal is written into it"], "orange")
    drawn.text(80, 330, "kernels read", "muted", size=12)
    drawn.arrow((235, 306), (235, 340))
    drawn.arrow((446, 306), (446, 340))
    drawn.box(156, 340, 390, 38, ["attention of step 7"], "grey")
    drawn.rect(572, 112, 48, 50, "fill-green edge")
    drawn.text(596, 132, "receipt", size=11, anchor="middle", room=48)
    drawn.text(596, 150, "7", "bold", anchor="middle")
    drawn.arrow((546, 281), (596, 281), (596, 162))
    drawn.text(552, 300, "was read", "muted", size=12)
    return drawn
