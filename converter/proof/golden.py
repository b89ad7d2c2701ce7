"""Golden samples: a few inputs and the reference's answers, kept in the artifact and run before the model is ready."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from bf16kit.artifact import Artifact
from bf16kit.budget import Budget
from bf16kit.errors import ConversionError
from converter.graph.equality import same_bits
from converter.model import Feeds
from converter.proof.judging import over
from converter.proof.measure import Drifts

NAME = "golden.safetensors"


def own(profile: str) -> str:
    """The file of golden samples that are those of ``profile`` alone."""
    return f"golden.{profile}.safetensors"


def choose(budget: Budget, answered: Collection[Mapping[int, Drifts]]) -> int:
    """The number of the first sample that all profiles answer within ``budget``; 0 when there is none.

    ``answered`` has the drift of each profile by the number of the sample. A budget bounds the mean of many samples; a
    server judges one, and a model that cancels most of one sample's signal is none the worse for it.
    """
    shared = set.intersection(*map(set, answered)) if answered else set()
    return next((n for n in sorted(shared) if not any(over(budget, [found[n]]) for found in answered)), 0)


def write(path: Path, feeds: Feeds, outputs: Feeds) -> None:
    """Write one feed and its reference outputs under the keys ``input:NAME`` and ``output:NAME``."""
    from safetensors.numpy import save

    # ascontiguousarray would give a scalar a dimension
    arrays = {f"input:{name}": np.asarray(array, order="C") for name, array in feeds.items()}
    arrays |= {f"output:{name}": np.asarray(array, order="C") for name, array in outputs.items()}
    path.write_bytes(save(arrays))  # save_file makes files that only their owner can read


def check(artifact: Artifact, name: str, feeds: Feeds, outputs: Feeds) -> None:
    """Read the golden samples in the file ``name`` of ``artifact`` back: a server judges every start by them.

    Raises :class:`ConversionError` naming the array that is not what the reference was fed or answered.
    """
    kept = artifact.golden_in(name)
    for what, meant, found in (("input", feeds, kept.inputs), ("output", outputs, kept.outputs)):
        wrong = [n for n in meant.keys() | found.keys() if n not in meant or n not in found]
        wrong += [n for n in meant if n in found and not same_bits(np.asarray(meant[n]), found[n])]
        if wrong:
            raise ConversionError(
                f"{name}: {what} {min(wrong)!r} is not what the reference was run with; nothing was published. Run the"
                " conversion again, and report it if it stays"
            )
