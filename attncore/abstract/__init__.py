"""What a backend is made of. A vendor writes an AttentionBackend and an AttentionImpl; the rest comes from the core.

No module of this package imports torch or NumPy before a tensor is made. Plugins import these names from ``attncore``.
"""

from attncore.abstract.attention_impl import AttentionImpl, AttentionLayer, LayerFeatures, PlanKey
from attncore.abstract.attention_metadata import AttentionMetadata, AttentionMetadataBuilder, HostArrays, StepBuilder
from attncore.abstract.backend import AttentionBackend
from attncore.abstract.backend_config import BackendConfig
from attncore.abstract.spec_protocol import OptionFacts, SpecFacts
from attncore.vocabulary import AttentionType

__all__ = [
    "AttentionBackend",
    "AttentionImpl",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionType",
    "BackendConfig",
    "HostArrays",
    "LayerFeatures",
    "OptionFacts",
    "PlanKey",
    "SpecFacts",
    "StepBuilder",
]
