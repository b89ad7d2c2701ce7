"""Golden samples: a few inputs and the reference's answers, kept in the artifact and run before the model is ready."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bf16kit.artifact import Artifact
from bf16kit.errors import ConversionError
from converter.graph.equality import same_bits
from converter.model import Feeds

NAME = "golden.safetensors"


def write(path: Path, feeds: Feeds, outputs: Feeds) -> None:
    """Write one feed and its reference outputs under the keys ``input:NAME`` and ``output:NAME``."""
    from safetensors.numpy import save

    # ascontiguousarray would give a scalar a dimension
    arrays = {f"input:{name}": np.asarray(array, order="C") for name, array in feeds.items()}
    arrays |= {f"output:{name}": np.asarray(array, order="C") for name, array in outputs.items()}
    path.write_bytes(save(arrays))  # save_file makes files that only their owner can read


def check(artifact: Artifact, feeds: Feeds, outputs: Feeds) -> None:
    """Read the golden samples of ``artifact`` back: a server judges every start by them.

    Raises :class:`ConversionError` naming the array that is not what the reference was fed or answered.
    """
    kept = artifact.golden()
    for what, meant, found in (("input", feeds, kept.inputs), ("output", outputs, kept.outputs)):
        wrong = [n for n in meant.keys() | found.keys() if n not in meant or n not in found]
        wrong += [n for n in meant if n in found and not same_bits(np.asarray(meant[n]), found[n])]
        if wrong:
            raise ConversionError(
                f"{NAME}: {what} {min(wrong)!r} is not what the reference was run with; nothing was published. Run the"
                " conversion again, and report it if it stays"
            )
