"""Compare the file that ``restore`` writes with the checkpoint, bit by bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16kit.converter.read.safetensors_file import read_file

Array = NDArray[Any]


def assert_restored(path: Path, checkpoint: Mapping[str, Array]) -> None:
    """Assert that the file at ``path`` contains exactly ``checkpoint``: names, dtypes, shapes and bits."""
    found = read_file(path)
    assert sorted(found) == sorted(checkpoint)
    for name, array in checkpoint.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name
