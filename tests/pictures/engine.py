"""The host's time of a step's metadata inside vLLM 0.33 on a GPU: its own FlashInfer backend, and attncore's."""

from pictures.plots import read
from pictures.svg import Picture

THEIRS, OURS = "gpu/vllm_20261123.json", "gpu/vllm_20261123b.json"
BACKENDS = (("FLASHINFER", "vLLM", "orange", 4), ("ATTNCORE_FLASHINFER", "attncore", "blue", 0))
"""Name in vLLM, whose it is, and the colours of its bars and of their figures."""
MODES = (("eager", "without graphs (eager)"), ("FULL_DECODE_ONLY", "decodes in CUDA graphs (FULL_DECODE_ONLY)"))


def builds(rows):
    """(backend, mode) -> requests -> microseconds of `build`, the median of the last round, which is warm."""
    return {
        (name, mode): {
            int(size): rounds[-1]["build_us_median"] for size, rounds in rows[f"{name}, {mode}"]["rates"].items()
        }
        for name, *_ in BACKENDS
        for mode, _ in MODES
    }


def run():
    """vLLM's rows of one run, and attncore's of a later one."""
    return {**read(THEIRS), **{name: row for name, row in read(OURS).items() if name.startswith(BACKENDS[1][0])}}


def inside_vllm():
    rows = run()
    found = builds(rows)
    one = rows[f"{BACKENDS[0][0]}, {MODES[0][0]}"]
    said = "; ".join(
        f"{told}: " + ", ".join(
            f"{size} requests {found['FLASHINFER', mode][size]:.0f} and {us:.0f}"
            for size, us in found["ATTNCORE_FLASHINFER", mode].items()
        )
        for mode, told in MODES
    )  # fmt: skip
    drawn = Picture(
        640, 446, "Host time of a step's metadata inside vLLM 0.33, its own FlashInfer backend and attncore's",
        f"Microseconds of build, vLLM's and attncore's. {said}.",
    )  # fmt: skip
    drawn.text(16, 26, f"Metadata of a step inside vLLM {one['vllm']}, microseconds", "bold", size=15)
    drawn.text(
        16,
        46,
        f"host time of build on an {one['device']}, FlashInfer's kernels on both sides; medians",
        "muted",
        size=12,
    )
    left, scale, y = 120, 440 / 600, 62
    for tick in range(0, 601, 100):
        drawn.line((left + tick * scale, y), (left + tick * scale, 398), kind="rule")
        drawn.text(left + tick * scale, 414, str(tick), size=12, anchor="middle")
    for mode, told in MODES:
        drawn.text(16, y + 15, told, "bold", size=12)
        y += 24
        for size in found["FLASHINFER", mode]:
            drawn.text(16, y + 22, f"{size} request" + "s" * (size > 1), size=12)
            for number, (name, _, fill, colour) in enumerate(BACKENDS):
                us = found[name, mode][size]
                drawn.rect(left, y + 18 * number, round(us * scale, 1), 16, f"fill-{fill} edge", 0)
                drawn.text(
                    round(left + us * scale, 1) + 6, y + 18 * number + 12, f"{us:.0f}", f"bold of-{colour}", size=12
                )
            y += 46
        y += 6
    x = left
    for name, whose, fill, _ in BACKENDS:
        drawn.rect(x, 424, 14, 14, f"fill-{fill} edge", 2)
        drawn.text(x + 20, 436, f"{whose}'s {name}", size=12, room=260)
        x += 180
    return drawn
