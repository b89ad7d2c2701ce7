"""Golden samples: one feed and the reference's outputs, stored in the artifact and run before the model is ready."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.budget import Budget
from bf16kit.messages.errors import ConversionError
from converter.graph.equality import same_bits
from converter.source import Feeds
from converter.verify.judging import find_breaches
from converter.verify.measure import Drifts, SliceScales

NAME = "golden.safetensors"


def file_name(profile: str) -> str:
    """Return the name of the file with golden samples for ``profile`` alone."""
    return f"golden.{profile}.safetensors"


def choose(budget: Budget, runs: Collection[Mapping[int, Drifts]]) -> int:
    """Return the number of the first sample on which all profiles are within ``budget``; 0 if there is none.

    ``runs`` has the drift of each profile by sample number. A budget bounds the mean over many samples, but a
    server judges a single one. One sample over budget does not make the model worse: the model may cancel most of that
    sample's signal.
    """
    shared = set.intersection(*map(set, runs)) if runs else set()
    return next((n for n in sorted(shared) if not any(find_breaches(budget, [found[n]]) for found in runs)), 0)


def write(path: Path, feeds: Feeds, outputs: Feeds, scales: SliceScales) -> None:
    """Write one feed and its reference outputs under the keys ``input:NAME`` and ``output:NAME``.

    ``slices:NAME:AXIS`` is the root mean square that the errors of each slice are judged against, counting axes from 0
    without the batch's.
    """
    from safetensors.numpy import save

    # ascontiguousarray would turn a scalar into an array of one dimension
    arrays = {f"input:{name}": np.asarray(array, order="C") for name, array in feeds.items()}
    arrays |= {f"output:{name}": np.asarray(array, order="C") for name, array in outputs.items()}
    for name, axes in scales.items():
        arrays |= {f"slices:{name}:{axis}": np.sqrt(scale).astype(np.float32) for axis, scale in enumerate(axes)}
    path.write_bytes(save(arrays))  # save_file makes files that only their owner can read


def check(artifact: Artifact, name: str, feeds: Feeds, outputs: Feeds) -> None:
    """Read the golden samples in the file ``name`` of ``artifact`` back, because a server judges every start by them.

    Raises :class:`ConversionError` that names the array which differs from the reference's input or output.
    """
    kept = artifact.golden_in(name)
    for what, expected, found in (("input", feeds, kept.inputs), ("output", outputs, kept.outputs)):
        wrong = [n for n in expected.keys() | found.keys() if n not in expected or n not in found]
        wrong += [n for n in expected if n in found and not same_bits(np.asarray(expected[n]), found[n])]
        if wrong:
            raise ConversionError(
                f"{name}: {what} {min(wrong)!r} differs from the reference's; nothing was published. Run the"
                " conversion again, and report it if it happens again"
            )
