"""Golden samples: a few inputs and the reference's answers, kept in the artifact and run before the model is ready."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from converter.model import Feeds

NAME = "golden.safetensors"


def write(path: Path, feeds: Feeds, outputs: Feeds) -> None:
    """Write one feed and its reference outputs under the keys ``input:NAME`` and ``output:NAME``."""
    from safetensors.numpy import save

    # ascontiguousarray would give a scalar a dimension
    arrays = {f"input:{name}": np.asarray(array, order="C") for name, array in feeds.items()}
    arrays |= {f"output:{name}": np.asarray(array, order="C") for name, array in outputs.items()}
    path.write_bytes(save(arrays))  # save_file makes files that only their owner can read
