"""What every test needs: property tests that do not judge a busy machine by its speed, and the kernel that is meant."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

from bf16kit.runtime import kernel

# A deadline per example fails on a machine that is busy with something else, and says nothing about the code.
settings.register_profile("bf16kit", deadline=None)
settings.load_profile("bf16kit")

# kernels/tests/in_onnxruntime.sh runs the kernel's tests on a library that it has built with sanitizers.
if os.environ.get("BF16KIT_TEST_KERNEL"):
    kernel.LIBRARY = Path(os.environ["BF16KIT_TEST_KERNEL"])
