"""Fixtures that give each of the two backends its GPU, or skip with the reason if it cannot use one here.

With an NVIDIA driver and a CUDA build of the backend, the GPU is expected to work: tests fail and are not skipped.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from bf16kit.runtime.ort.session import has_cuda

DEVICE = "cuda:0"


def _without_driver() -> str:
    return "" if Path("/dev/nvidiactl").exists() else "no NVIDIA driver on this machine (/dev/nvidiactl is missing)"


@pytest.fixture(scope="session")
def onnx_device() -> str:
    """Return a CUDA device that ONNX Runtime can use."""
    if reason := _without_driver():
        pytest.skip(reason)
    if not has_cuda():
        pytest.skip("the installed ONNX Runtime has no CUDA provider: install bf16kit[gpu]")
    return DEVICE


@pytest.fixture(scope="session")
def torch_device() -> str:
    """Return a CUDA device that torch can use."""
    if reason := _without_driver():
        pytest.skip(reason)
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch

    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} is not a CUDA build")
    return DEVICE
