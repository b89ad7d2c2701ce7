"""The versions of what made an artifact: with the same ones, the same input gives the same bytes."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

_ALWAYS = ("bf16kit", "ml_dtypes", "numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "safetensors")
_TORCH = ("torch", "onnxscript", "transformers")


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that shape an artifact; torch's only when torch was used."""
    names = _ALWAYS + tuple(name for name in _TORCH if name in sys.modules)
    found = {name: _version(name) for name in names}
    return {"python": platform.python_version()} | {name: v for name, v in found.items() if v is not None}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
