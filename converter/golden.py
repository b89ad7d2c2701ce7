"""Golden samples: a few inputs and the reference's answers, kept in the artifact and run before the model is ready."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16kit.tensors import TensorSpec

NAME = "golden.safetensors"
_ROWS = 4


def write(path: Path, feeds: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> None:
    """Write one feed and its reference outputs under the keys ``input:NAME`` and ``output:NAME``."""
    from safetensors.numpy import save_file

    arrays = {f"input:{name}": np.ascontiguousarray(array) for name, array in feeds.items()}
    arrays |= {f"output:{name}": np.ascontiguousarray(array) for name, array in outputs.items()}
    save_file(arrays, path)


def storable(specs: tuple[TensorSpec, ...]) -> bool:
    """Whether safetensors can hold these tensors: it has no strings."""
    return all(spec.dtype != "string" for spec in specs)
