"""The versions of the packages that made an artifact: with the same versions, the same input gives the same bytes."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

_ALWAYS = ("bf16kit", "ml_dtypes", "numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "safetensors")


def versions(used: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python, of the packages behind every artifact, and of those ``used`` to read its source.

    ``used`` comes from the source, never from ``sys.modules``: other imports of the process must not change the result.
    """
    found = {name: version_of(name) for name in (*_ALWAYS, *used)}
    return {"python": platform.python_version()} | {name: v for name, v in found.items() if v is not None}


def onnxruntime() -> str | None:
    """Return the version of the installed ONNX Runtime, for CPUs or GPUs; None if there is none."""
    return version_of("onnxruntime") or version_of("onnxruntime-gpu")


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
