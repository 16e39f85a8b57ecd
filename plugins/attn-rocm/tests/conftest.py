"""Tests in ``under_device`` run where the kernels run: in processes of their own, which ``test_devices.py`` starts."""

import os

collect_ignore = [] if "ATTNCORE_ROCM_DEV_DEVICE" in os.environ else ["under_device"]
