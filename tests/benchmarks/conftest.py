"""Metadata-build latency. ``make bench`` times these; without it each runs once, as a test that it works.

A saved run describes the machine, and nothing that would tell whose it is.
"""

import os
import platform

import numpy as np

from attncore import slots

CPU = (
    "arch", "bits", "brand_raw", "count", "family", "hz_advertised_friendly", "model", "stepping", "vendor_id_raw",
)  # fmt: skip
"""What a saved run says of the processor: which it is, and nothing that changes from one run to the next."""


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["node"] = "withheld"
    machine_info["cpu"] = {name: value for name, value in machine_info["cpu"].items() if name in CPU}
    machine_info["cores"] = os.cpu_count()
    machine_info["kernels"] = slots.load_kernels().IMPLEMENTATION
    machine_info["reads_ints"] = slots.load_kernels().READS_INTS
    machine_info["numpy"] = np.__version__
    machine_info["release"] = platform.system()
