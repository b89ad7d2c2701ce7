"""The versions of what made an artifact: with the same ones, the same input gives the same bytes."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

_ALWAYS = ("bf16kit", "ml_dtypes", "numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "safetensors")


def versions(used: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python, of the packages behind every artifact, and of those ``used`` to read this one's source.

    ``used`` comes from the source, never from ``sys.modules``: what else a process has imported must not show.
    """
    found = {name: version_of(name) for name in (*_ALWAYS, *used)}
    return {"python": platform.python_version()} | {name: v for name, v in found.items() if v is not None}


def onnxruntime() -> str | None:
    """The version of the installed ONNX Runtime, for CPUs or GPUs; None when there is none."""
    return version_of("onnxruntime") or version_of("onnxruntime-gpu")


def version_of(name: str) -> str | None:
    """The version of an installed package; None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
