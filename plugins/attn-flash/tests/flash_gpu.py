"""What the tests on a GPU share: one generation of the library, called before anything is chosen by what it lacks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_flash import probe, probe_results

from attncore import Host
from attncore.registry.plugins import load
from attncore.testing.harness.subject import Subject

COMPILES = (
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # of generation 4 while it compiles
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
)


def subject(generation: str, *, use_mla: bool = False) -> Subject:
    """The kit's subject where only ``generation`` is installed, with ``use_mla`` over latent caches; a skip where it is
    not.
    """
    if probe_results.library(generation) is None:
        pytest.skip(f"{probe_results.DISTRIBUTIONS[generation]} is not installed")
    probe.again(generation, torch.device("cuda", 0))
    load.forget()  # the spec is made of what was found
    others = probe_results.DISTRIBUTIONS.keys() - {generation}
    host = dataclasses.replace(Host.probe(), packages={probe_results.DISTRIBUTIONS[other]: "" for other in others})
    return Subject("flash", host=host, use_mla=use_mla)
