"""docs/conformance-faults.md: the planted faults, what finds each and what is said.

``PYTHONPATH=tests:. python tests/testing/fault_table.py --write`` makes it anew.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from testing import (
    adopted_faults,
    cache_faults,
    cause_faults,
    crossed_faults,
    declared_faults,
    encoder_faults,
    feature_faults,
    given_cache_faults,
    latent_faults,
    list_builder_faults,
    lse_faults,
    metadata_faults,
    option_faults,
    plan_faults,
    result_faults,
    scale_faults,
    span_faults,
    spec_faults,
    step_faults,
    strided_faults,
    tile_faults,
    tree_faults,
)
from testing.faulty_backend import Fault

PAGE = Path(__file__).parents[2] / "docs" / "conformance-faults.md"
MODULES = {
    "Features, heads and scales": feature_faults,
    "The spec, sizes and refusals": spec_faults,
    "What a spec declares": declared_faults,
    "The cache": cache_faults,
    "Caches of an engine, and attending without writing": given_cache_faults,
    "Results, and torch's settings": result_faults,
    "Steps, padding and captured sizes": step_faults,
    "Strided tensors": strided_faults,
    "Steps that the backend's own list builder plans": list_builder_faults,
    "Steps that are adopted from an engine": adopted_faults,
    "Writes to metadata": metadata_faults,
    "Encoders, cross attention and latent caches": encoder_faults,
    "Latent caches alone": latent_faults,
    "Scales, and fp8 caches as bytes": scale_faults,
    "Draft trees": tree_faults,
    "Spans in both directions": span_faults,
    "Log-sum-exp and ranks": lse_faults,
    "Options": option_faults,
    "Two settings at once": crossed_faults,
    "Mistakes that a hint names": cause_faults,
    "In the manner of libraries that plan (flash, flashinfer)": plan_faults,
    "In the manner of kernels (rocm) and of the reference": tile_faults,
}
"""Title -> the module that plants them."""
HEAD = """# Faults that the conformance kit finds

Each of these {count} mistakes is planted in a backend that is right otherwise; the kit has to fail, by the test named
here, and say what stands beside it. The page is made by `tests/testing/fault_table.py` from the faults' sources in
`tests/testing/*_faults.py`; `tests/testing/test_planted_faults.py` plants them: one of each test in `make test`, all in
`make test-all`. What the kit checks, and how, is in [conformance.md](conformance.md).
"""


def faults_of(module) -> tuple[Fault, ...]:
    """The faults that a module plants."""
    (found,) = [held for name, held in vars(module).items() if name.endswith("_FAULTS")]
    return found


EVERY_FAULT = tuple(fault for module in MODULES.values() for fault in faults_of(module))


def rendered() -> str:
    """The page."""
    lines = [HEAD.format(count=len(EVERY_FAULT))]
    for title, module in MODULES.items():
        lines += [f"## {title}", "", "| mistake | found by | what is said |", "|---|---|---|"]
        for fault in faults_of(module):
            said = fault.says.removeprefix("; ").replace("|", "\\|")
            said = f"... {said} ..." if said else "that the results differ, or an error of the backend's own"
            lines.append(f"| {fault.name.replace('_', ' ')} | `{fault.test}` | {said} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(rendered())
    else:
        print(rendered(), end="")
