"""How an advance of a step that did not come to its end is taken back, by itself or by whoever reads the step next."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from attncore.builder.metadata import CommonAttentionMetadata


class Before:
    """What a step was before an advance. One that fails keeps it as ``_unfinished`` of the step until that is settled.

    ``attributes``: those that change, or all where the step is given others. ``tokens``: the engine's, which are
    written to, or None: a plain array of them, for what a subclass does when it is written to is its own code.
    """

    def __init__(self, metadata: CommonAttentionMetadata, attributes: dict[str, Any], tokens: Any) -> None:
        self.of, self.attributes, self.tokens, self.restored = type(metadata), attributes, None, False
        if tokens is not None:
            self.tokens = tokens, tokens.clone() if hasattr(tokens, "clone") else tokens.copy()

    def restore(self, metadata: Any) -> dict[str, Any]:
        """Makes the step what it was, and returns its attributes; right to call again where it is interrupted."""
        object.__setattr__(metadata, "__dict__", self.attributes)
        return self.attributes


class Unsettled(CommonAttentionMetadata):
    """The class of a step while an advance of it is taken back: where that is interrupted too, the next read goes on
    with it. Steps that are whole are asked nothing.
    """

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            settle(self)
            return getattr(self, name)  # it has its own class again


def settle(metadata: Any) -> None:
    """Takes back an advance that was interrupted, where one was; right to call again where it is interrupted itself."""
    before: Before | None = object.__getattribute__(metadata, "__dict__").get("_unfinished")
    if before is None:
        return
    held = before.restore(metadata)
    if before.tokens is not None:
        tokens, values = before.tokens
        with contextlib.suppress(Exception):  # the array of the engine refuses to be written to, which is reported
            tokens[...] = values
    object.__setattr__(metadata, "__class__", before.of)
    before.restored = True
    held.pop("_unfinished", None)
