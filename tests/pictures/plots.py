"""Plots of committed runs: what metadata takes by batch size, and where the host's time of a served step goes.

They are drawn here and not by pygal: lines have their names at their ends, colours follow the page's scheme, and the
same run gives the same file whatever is installed.
"""

import itertools
import json
import math
import pathlib

from pictures.svg import Picture

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
PEERS, SERVED = "peers/peers_20261123.json", "gpu/served_step_20261123.json"
LINES = (
    ("vLLM 0.8.5.post1", "vLLM, FlashAttention builder", ("vLLM 0.8.5", "FlashAttention builder"), 4),
    ("vLLM 0.18.1", "vLLM, FlashAttention, metadata", ("vLLM 0.18.1", "FlashAttention metadata"), 1),
    ("vLLM 0.8.5.post1", "NumPy", ("NumPy", "vectorised, buffers kept"), 3),
    ("vLLM 0.8.5.post1", "attncore, list builder, flash", ("attncore, list builder", "takes lists, as 0.8.5 does"), 2),
    ("vLLM 0.18.1", "attncore, persistent builder", ("attncore, persistent", "keeps a batch, as 0.18 does"), 0),
)
"""Peer, way, what its line is called in two lines, and its colour."""


def read(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def lower_quartiles(run):
    """For each of LINES microseconds by the number of requests: other work on the machine moves the median more."""
    peers = {peer["peer"]: peer["batches"] for peer in run["peers"]}
    found = []
    for peer, way, *_ in LINES:
        sizes = {
            int(name.split()[1].rstrip(",")): batch["us"][way]["q1"]
            for name, batch in peers[peer].items()
            if name.endswith("contexts 100 to 2000")
        }
        found.append(dict(sorted(sizes.items())))
    return found


def apart(wanted, gap):
    """Heights at least ``gap`` apart, none above where it was wanted."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    found = list(wanted)
    for one, other in itertools.pairwise(order):
        found[other] = max(found[other], found[one] + gap)
    return found


def metadata_by_size():
    run = read(PEERS)
    lines = lower_quartiles(run)
    sizes = list(lines[0])
    left, right, top, bottom = 66, 432, 66, 346
    powers = range(-1, 5)

    def x_of(size):
        return left + 14 + (right - left - 28) * math.log2(size) / math.log2(sizes[-1])

    def y_of(us):
        return bottom - (math.log10(us) - powers[0]) * (bottom - top) / (len(powers) - 1)

    said = "; ".join(
        f"{', '.join(name)}: {points[256]:.3g} us at 256, {points[1024]:.3g} at 1024"
        for (_, _, name, _), points in zip(LINES, lines, strict=True)
    )
    drawn = Picture(
        640, 402, "Host time of a step's attention metadata, by the number of requests that decode",
        f"Lower quartiles of {run['rounds']} turns, logarithmic scales, {run['date']}. {said}.",
    )  # fmt: skip
    drawn.text(16, 26, "Attention metadata of a step, microseconds", "bold", size=15)
    drawn.text(
        16,
        46,
        f"in a loop, on one core; each request has 100 to 2000 tokens; lower quartile of {run['rounds']}",
        "muted",
        size=12,
    )
    for power in powers:
        y = y_of(10.0**power)
        drawn.line((left, y), (right, y), kind="rule")
        drawn.text(left - 8, y + 4, f"{10.0**power:,g}", size=12, anchor="end")
    for size in sizes:
        drawn.text(x_of(size), bottom + 20, str(size), size=12, anchor="middle")
    drawn.text((left + right) / 2, bottom + 40, "requests", "muted", size=12, anchor="middle")
    names = apart([y_of(points[sizes[-1]]) for points in lines], 33)
    for (_, _, name, colour), points, y in zip(LINES, lines, names, strict=True):
        drawn.line(
            *((round(x_of(size), 1), round(y_of(us), 1)) for size, us in points.items()), kind=f"series series-{colour}"
        )
        for size, us in points.items():
            drawn.dot(x_of(size), y_of(us), f"of-{colour}")
        drawn.text(right + 8, round(y, 1), name[0], f"bold of-{colour}")
        drawn.text(right + 8, round(y, 1) + 15, name[1], "muted", size=12)
    return drawn


PARTS = {
    "schedule": "grey", "batch": "blue", "build": "blue", "replay": "blue", "launch": "purple", "fields": "grey",
    "book": "grey",
}  # fmt: skip
"""The host's parts of a step, in their order and less the wait for the device, and their colours."""
ROWS = (("flash", 64), ("flash", 256), ("flashinfer", 64), ("flashinfer", 256))


def decodes(run):
    """Backend and number of requests -> the row of the stand-in model whose requests all decode."""
    return {
        (row["backend"], row["rows"]): row
        for row in run["rows"]
        if (row["model"], row["kind"], row["transport"]) == ("standin", "decode", "graph")
    }


def served_step():
    run = read(SERVED)
    rows = decodes(run)
    ours = {key: row["attncore_us"]["median"] for key, row in rows.items()}
    said = "; ".join(
        f"{key[0]}, {key[1]} requests: attncore {ours[key]:.0f} of {1000 * rows[key]['step_ms']:,.0f}" for key in ROWS
    )
    drawn = Picture(
        640, 420, "Where the time of a served step goes",
        "The device works for about 3.0 ms of each step; before and after it the host schedules, builds metadata, "
        f"launches the graph and keeps the books. Microseconds: {said}.",
    )  # fmt: skip
    first = rows[ROWS[0]]
    drawn.text(16, 26, "A served step: host and device, microseconds", "bold", size=15)
    drawn.text(
        16, 46, f"{run['machine']['gpu']}, caches cold, every request decodes; medians of each part", "muted", size=12
    )
    _whole(drawn, first)
    drawn.text(16, 168, "The host's part, magnified", "bold")
    left, scale = 150, 466 / 320
    for tick in range(0, 301, 50):
        drawn.line((left + tick * scale, 182), (left + tick * scale, 362), kind="rule")
        drawn.text(left + tick * scale, 378, str(tick), size=12, anchor="middle")
    for number, key in enumerate(ROWS):
        y = 190 + number * 43
        drawn.text(16, y + 14, f"{key[0]}, {key[1]}", size=12)
        drawn.text(16, y + 30, f"attncore {ours[key]:.0f}", "bold of-0", size=12)
        x = left
        for part, fill in PARTS.items():
            wide = rows[key]["parts_us"][part]["median"] * scale
            if wide:
                drawn.rect(round(x, 1), y, round(wide, 1), 34, f"fill-{fill} edge", 0)
            x += wide
    x = 16
    for fill, name in (("grey", "scheduler, tokens, book-keeping"), ("blue", "attncore: batch, build, replay"),
                       ("purple", "launch of the graph")):  # fmt: skip
        drawn.rect(x, 393, 14, 14, f"fill-{fill} edge", 2)
        drawn.text(x + 20, 405, name, size=12, room=220)
        x += 38 + len(name) * 6.4
    return drawn


def _whole(drawn, row):
    """The whole step in scale: what the host does before the device works, the device, and what it does after."""
    parts = {name: part["median"] for name, part in row["parts_us"].items()}
    before = sum(parts[name] for name in ("schedule", "batch", "build", "replay", "launch"))
    after = parts["fields"] + parts["book"]
    left, width = 150, 466
    scale = width / (before + parts["wait"] + after)
    drawn.text(16, 82, "host (flash, 64)", size=12)
    drawn.text(16, 120, "device", size=12)
    drawn.rect(left, 62, round(before * scale, 1), 32, "fill-grey edge", 0)
    drawn.rect(round(left + width - after * scale, 1), 62, round(after * scale, 1), 32, "fill-grey edge", 0)
    drawn.text(left + width / 2, 82, f"waits {parts['wait']:,.0f}", "muted", size=12, anchor="middle")
    drawn.rect(round(left + before * scale, 1), 100, round(parts["wait"] * scale, 1), 32, "fill-orange edge", 0)
    busy = f"busy with a stand-in model, {1000 * row['device_ms']:,.0f}"
    drawn.text(left + width / 2, 120, busy, size=12, anchor="middle")
    drawn.text(left, 148, f"{before:.0f} before", "muted", size=12)
    drawn.text(left + width, 148, f"{after:.0f} after", "muted", size=12, anchor="end")
