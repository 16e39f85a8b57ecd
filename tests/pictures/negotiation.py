"""How a backend is chosen: request and host, specs, checks, choice with reasons."""

from pictures.svg import Picture

CANDIDATES = (
    ("flash", "not usable", "requirement: flash-attn-4 or flash-attn", "grey"),
    ("flashinfer", "usable", "priority 55 on cuda:sm_90", "green"),
    ("rocm", "usable", "priority 30 on cuda:sm_89+", "green"),
    ("reference", "usable", "priority 0 on any device", "green"),
)


def negotiation():
    drawn = Picture(
        640, 420, "Negotiation: from a request to a choice with reasons",
        "A request (heads, dtype, features, graphs), a host (device and packages) and the specs of the installed "
        "plugins are all that counts. Every spec is checked against request and host. Here flash has a "
        "reason against it, flashinfer, rocm and reference are usable. The usable ones are ordered by name asked for,"
        " preference, priority, how specifically they name the device, and name. The choice says the backend, its "
        "block size and cache layout, and every candidate's reasons.",
    )  # fmt: skip
    for x, lines in ((12, ["AttentionRequest", "heads, dtype, features"]), (222, ["Host", "device, packages"]),
                     (432, ["Specs", "of installed plugins"])):  # fmt: skip
        drawn.box(x, 14, 196, 52, lines, "blue")
        drawn.line((x + 98, 66), (x + 98, 84))
    drawn.line((110, 84), (530, 84))
    drawn.arrow((320, 84), (320, 104))
    drawn.box(
        12,
        104,
        616,
        48,
        ["Checks of every spec", "device, dtypes, sizes, layouts, features, graphs, packages, its own"],
    )
    for number, (name, state, why, fill) in enumerate(CANDIDATES):
        y = 174 + number * 34
        drawn.box(12, y, 110, 28, [name], fill)
        drawn.text(136, y + 19, state, size=12)
        drawn.text(236, y + 19, why, "mono", size=12)
    drawn.arrow((320, 152), (320, 170))
    drawn.arrow((320, 310), (320, 330))
    drawn.text(334, 325, "named, preferred, priority, device, name", "muted", size=12)
    drawn.box(12, 330, 616, 70, ["Choice: flashinfer", "block_size 16, kv_cache_layout NHD",
                                 "explain(): every reason of every candidate"], "green")  # fmt: skip
    return drawn
