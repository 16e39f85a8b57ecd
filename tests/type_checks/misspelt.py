"""Misspelt names that a type checker must refuse. ``make types`` checks this file; nothing runs it.

Strict mypy reports an ``ignore`` that is not needed: a name that passes again, because a ``__getattr__`` or ``Any``
came back, fails there.
"""

import torch

import attncore
from attncore.builder import CommonAttentionMetadata, CommonMetadataBuilder, MetadataBuilder
from attncore.registry.choice.negotiate_installed import negotiate_installed, negotiate_installed_joint


def fields(metadata: CommonAttentionMetadata, builder: MetadataBuilder, lists: CommonMetadataBuilder) -> None:
    _ = metadata.slot_mapping, metadata.host.slot_mapping, builder.build().block_table, lists.build([]).seq_lens
    _ = metadata.slot_maping  # type: ignore[attr-defined]
    _ = metadata.host.slot_maping  # type: ignore[attr-defined]
    _ = builder.build().slot_maping  # type: ignore[attr-defined]
    _ = builder.build().groups["full"].host.slot_maping  # type: ignore[attr-defined]
    _ = lists.build([]).slot_maping  # type: ignore[attr-defined]
    if metadata.decode_metadata is not None:
        _ = metadata.decode_metadata.slot_maping  # type: ignore[attr-defined]


def requests(request: attncore.AttentionRequest) -> None:
    attncore.select(num_heads=1, num_kv_heads=1, head_size=64, dtype="bfloat16")
    attncore.select(num_heads=1, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, policy="fallback")
    attncore.select(request, block_size=16, host=attncore.Host.assume("cpu"))
    attncore.select(num_head=1)  # type: ignore[call-arg]
    attncore.select(request, policy="fall")  # type: ignore[arg-type]
    attncore.select_joint(num_head=1)  # type: ignore[call-arg]
    attncore.select_for_layers({"full": request}, num_head=1)  # type: ignore[call-arg]
    attncore.select_for_layers({"full": request}, host=None, policy="fallback")["full"].create()
    negotiate_installed(num_head=1)  # type: ignore[call-arg]
    negotiate_installed_joint(request, num_head=1)  # type: ignore[call-arg]


def names() -> None:
    _ = attncore.selct  # type: ignore[attr-defined]
