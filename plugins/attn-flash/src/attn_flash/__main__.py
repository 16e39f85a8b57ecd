"""``python -m attn_flash``: call what is installed on the first CUDA device, and keep and print what comes of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from attn_flash import probe_results


def main(arguments: Sequence[str] | None = None) -> int:
    """0: something runs; 1: nothing installed runs; 3: no CUDA device, or nothing is installed."""
    about = "Call what is installed on the first CUDA device, and keep and print what comes of it."
    argparse.ArgumentParser("python -m attn_flash", description=about).parse_args(arguments)
    import torch

    installed = [generation for generation in probe_results.DISTRIBUTIONS if probe_results.library(generation)]
    if not installed or not torch.cuda.is_available():
        print(
            "no library is installed: flash-attn-4, flash-attn-3, vllm or flash-attn"
            if not installed
            else "torch finds no CUDA device"
        )
        return 3
    from attn_flash.doctor import said
    from attn_flash.probe import again

    found = {generation: again(generation, torch.device("cuda", 0)) for generation in installed}
    for generation, one in found.items():
        print(f"variant fa{generation}: {one.library} {said(one)}")
    return int(all(one.fails for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
