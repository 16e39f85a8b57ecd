"""The modules of the generations, each of which has ``load``, for its library, and ``Layer``, for a layer's calls."""

from __future__ import annotations

from typing import Any

from attn_flash import generation2, generation3, generation3_vllm, generation4

MODULES: dict[str, Any] = {"2": generation2, "3": generation3, "3_vllm": generation3_vllm, "4": generation4}
"""By what a variant is called behind ``fa``."""

Layer = generation2.Layer | generation3.Layer | generation4.Layer
