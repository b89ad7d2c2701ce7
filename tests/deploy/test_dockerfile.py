"""What the Dockerfile repeats of the project's files. ``test_image.py`` and ``test_distributions.py`` check more."""

import re
import tomllib
from pathlib import Path

from pins import pins

import bf16kit

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text("utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]


def test_the_build_names_no_processor() -> None:
    """The same file builds for linux/amd64 and linux/arm64: what differs, pip, apt and `uname` choose."""
    text = "".join(
        (ROOT / name).read_text("utf-8") for name in ("Dockerfile", "deploy/image/bill.txt", "constraints.txt")
    )
    assert re.findall(r"(?i)x86|i386|amd64|aarch64|arm64|manylinux|\.whl\b|TARGETARCH", text) == []


def test_the_default_version_is_the_packages() -> None:
    """`make image` passes the version; `docker compose build` does not, and then this default applies."""
    assert set(re.findall(r"^ARG VERSION=(\S+)$", TEXT, re.MULTILINE)) == {bf16kit.__version__}


def test_constraints_and_tools_are_exact() -> None:
    pinned = pins(ROOT / "constraints.txt")
    assert {"setuptools", "onnxruntime", "onnxruntime-gpu", "torch"} <= pinned.keys()
    assert pinned["onnxruntime"] == pinned["onnxruntime-gpu"]  # one version of the runtime, tested once
    assert "cyclonedx-bom" in pins(ROOT / "deploy" / "image" / "bill.txt")


def test_variants_use_existing_extras_and_only_two_have_torch() -> None:
    variants = dict(re.findall(r"([a-z-]+)\) extras=([a-z,]+)", TEXT))
    assert variants.keys() == {"cpu", "cpu-torch", "gpu", "gpu-torch"}
    for extras in variants.values():
        assert set(extras.split(",")) <= EXTRAS.keys()
        assert len({"cpu", "gpu"} & set(extras.split(","))) == 1  # both contain the same package
    with_torch = {name for name, extras in variants.items() if "torch" in str([EXTRAS[e] for e in extras.split(",")])}
    assert with_torch == {"cpu-torch", "gpu-torch"}


def test_the_gpu_extra_brings_the_libraries_that_the_cuda_provider_needs() -> None:
    """The runtime's extras name all but cuBLAS, which cuDNN's wheel requires; each is pinned with the runtime."""
    assert EXTRAS["gpu"] == ["onnxruntime-gpu[cuda,cudnn]>=1.24"]
    needed = {"nvidia-cublas", "nvidia-cuda-runtime", "nvidia-curand", "nvidia-cudnn-cu13"}
    loaded_later = {"nvidia-cuda-nvrtc", "nvidia-cufft", "nvidia-nvjitlink"}
    assert needed | loaded_later <= pins(ROOT / "constraints.txt").keys()
