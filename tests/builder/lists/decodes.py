"""Steps of decodes for advance_step, and every field of a step as plain values."""

import numpy as np
import torch

from attncore import BackendConfig
from attncore.builder import Sequence, SequenceGroup
from attncore.builder.fields import ARRAYS, COUNTS
from attncore.reference import ReferenceBackend


def plain(value):
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value


def fields(metadata):
    """Every field that metadata has."""
    names = [*sorted(ARRAYS), *COUNTS]
    return {name: plain(getattr(metadata, name)) for name in names if hasattr(metadata, name)}


def decodes(rows):
    """Groups of one sequence: (context, table)."""
    return [SequenceGroup(False, [Sequence(i, 1, context, table)]) for i, (context, table) in enumerate(rows)]


def backend(block_size=4):
    return ReferenceBackend(BackendConfig(2, 1, 8, "float32", block_size))
