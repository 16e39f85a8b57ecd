"""Metadata-build latency. ``make bench`` times these; without it each runs once, as a test that it works.

A saved run describes the machine, and nothing that would tell whose it is.
"""

import os
import platform

import numpy as np

from attncore import slots


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["node"] = "withheld"
    machine_info["cores"] = os.cpu_count()
    machine_info["kernels"] = slots.load_kernels().IMPLEMENTATION
    machine_info["reads_ints"] = slots.load_kernels().READS_INTS
    machine_info["numpy"] = np.__version__
    machine_info["release"] = platform.system()
