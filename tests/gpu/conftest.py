"""Which of the two backends can use a GPU here, or the reason why not.

A machine with an NVIDIA driver and a CUDA build of the backend is expected to work: there the tests fail, not skip.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from bf16kit.runtime.session import has_cuda

DEVICE = "cuda:0"


def _without_driver() -> str:
    return "" if Path("/dev/nvidiactl").exists() else "no NVIDIA driver on this machine (/dev/nvidiactl is missing)"


@pytest.fixture(scope="session")
def onnx_device() -> str:
    """A CUDA device that ONNX Runtime can use."""
    if reason := _without_driver():
        pytest.skip(reason)
    if not has_cuda():
        pytest.skip("the installed ONNX Runtime has no CUDA provider: install bf16kit[gpu]")
    return DEVICE


@pytest.fixture(scope="session")
def torch_device() -> str:
    """A CUDA device that torch can use."""
    if reason := _without_driver():
        pytest.skip(reason)
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch

    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} is not a CUDA build")
    return DEVICE
