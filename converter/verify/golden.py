"""Golden samples: a few rows of one feed with the reference's outputs, on which a server judges every start.

They are bounded, so that they never weigh as much as a small model, and a start does not wait for them. A feed of more
rows is cut into parts along the batch axis, where each row has the same outputs alone as in company; each part is
judged as a server would, and one of them is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.graph.equality import same_bits
from bf16kit.converter.source import Feeds
from bf16kit.converter.verify.measure import Expected, Place, SliceScales
from bf16kit.messages.errors import ConversionError

GOLDEN = "golden.safetensors"
MOST_ROWS = 8  # a server runs that many at once
SHARE, LEAST = 0.0025, 64_000  # of the checkpoint, and bytes: the larger bounds the file, but for its first row


def rows_kept(feeds: Sequence[Feeds], outputs: Sequence[Feeds], scales: SliceScales, checkpoint: int) -> int:
    """Return how many rows golden samples have at most, if the first axis of ``feeds`` and ``outputs`` is the batch's.

    It is at least 1, and one number for all feeds: that of the feed with the largest rows. ``checkpoint`` is in bytes.
    """
    room = max(SHARE * checkpoint, LEAST) - sum(4 * scale.size for axes in scales.values() for scale in axes)
    kept = MOST_ROWS
    for feed, answers in zip(feeds, outputs, strict=True):
        arrays = [np.asarray(array) for array in (*feed.values(), *answers.values())]
        row = sum(array.nbytes for array in arrays) / max(1, len(arrays[0]))
        kept = min(kept, int(room // max(1.0, row)))
    return max(1, kept)


def golden_samples(expected: Expected, place: Place) -> tuple[Feeds, Feeds]:
    """Return the inputs and the reference's outputs at ``place``."""
    feed, outputs, rows = expected.feeds[place.feed], expected.outputs[place.feed], expected.golden_rows
    if rows is None:
        return feed, outputs
    part = slice(rows * place.part, rows * (place.part + 1))
    inputs, answers = ({name: array[part] for name, array in each.items()} for each in (feed, outputs))
    return inputs, answers


def describe(expected: Expected, place: Place) -> str:
    """Name the rows at ``place`` for users."""
    rows = len(next(iter(golden_samples(expected, place)[0].values()))) if expected.golden_rows else 0
    if expected.golden_rows is None or rows == len(next(iter(expected.feeds[place.feed].values()))):
        return f"sample {place.feed}"
    first = place.part * expected.golden_rows
    which = f"row {first}" if rows == 1 else f"rows {first} to {first + rows - 1}"
    return f"{which} of sample {place.feed}"


def save_golden(path: Path, feeds: Feeds, outputs: Feeds, scales: SliceScales) -> None:
    """Write inputs and their reference outputs under the keys ``input:NAME`` and ``output:NAME``.

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


def check_golden(artifact: Artifact, feeds: Feeds, outputs: Feeds) -> None:
    """Read the golden samples of ``artifact`` back, because a server judges every start by them.

    Raises :class:`ConversionError` that names the array which differs from the reference's input or output.
    """
    kept = artifact.golden()
    for what, expected, found in (("input", feeds, kept.inputs), ("output", outputs, kept.outputs)):
        for each in sorted(expected.keys() | found.keys()):
            if not (each in expected and each in found and same_bits(np.asarray(expected[each]), found[each])):
                raise ConversionError(
                    f"{GOLDEN}: {what} {each!r} differs from the reference's; nothing was published. Run the conversion"
                    " again, and report it if it happens again"
                )
