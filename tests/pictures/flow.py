"""A step's way: scheduler, InputBatch, build, metadata, kernel, cache."""

from pictures.svg import Picture

LANES = ((12, 186, "your engine", "grey"), (210, 216, "attncore", "blue"), (438, 190, "kernel library", "orange"))


def flow():
    drawn = Picture(
        640, 372, "A step of an engine, from the scheduler to the cache",
        "The scheduler of an engine tells InputBatch which requests and blocks there are, and "
        "MetadataBuilder.build which requests run how many tokens. The build makes metadata: slots, block tables, "
        "lengths and positions. The kernel library's attention reads the metadata and the queries, keys and values"
        " of the model's layer, and reads and writes the paged cache.",
    )  # fmt: skip
    for x, width, name, fill in LANES:
        drawn.rect(x, 34, width, 326, "paper edge")
        drawn.text(x + width / 2, 24, name, "bold", anchor="middle", room=width)
        drawn.rect(x, 34, width, 5, f"fill-{fill}", 2)
    engine, ours, theirs = (x + 14 for x, *_ in LANES)
    drawn.box(engine, 56, 158, 64, ["Scheduler", "who runs, how much"])
    drawn.box(engine, 286, 158, 58, ["Model layer", "q, k, v of new tokens"])
    drawn.box(ours, 56, 188, 64, ["InputBatch", "requests, blocks,", "lengths"], "blue")
    drawn.box(ours, 150, 188, 48, ["MetadataBuilder", ".build()"], "blue")
    drawn.box(ours, 228, 188, 48, ["metadata", "slots, tables, lengths"], "blue")
    drawn.box(theirs, 56, 162, 102, ["KV cache in blocks", "keys and values", "of all tokens", "so far"], "orange")
    drawn.box(
        theirs,
        228,
        162,
        116,
        ["Attention kernel", "writes new k and v,", "reads all that", "a token may see"],
        "orange",
    )
    drawn.arrow((engine + 158, 76), (ours, 76))
    drawn.arrow((engine + 79, 120), (engine + 79, 174), (ours, 174))
    drawn.text(engine + 6, 194, "tokens of this step", "muted", size=12, room=150)
    drawn.arrow((ours + 94, 120), (ours + 94, 150))
    drawn.arrow((ours + 94, 198), (ours + 94, 228))
    drawn.arrow((ours + 188, 252), (theirs, 252))
    drawn.arrow((engine + 158, 315), (theirs, 315))
    drawn.arrow((theirs + 81, 228), (theirs + 81, 158), both=True)
    return drawn
