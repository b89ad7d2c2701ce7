"""A private copy of a profile's weights, so that the weights that serve are those that were verified.

A session maps its weights. If an artifact's file were truncated in place (``cp`` over it does that), SIGBUS would kill
every process that maps it. If it were overwritten, outputs would change without another check.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import Segment
from bf16kit.artifact.reading import read_segment
from bf16kit.numerics.tensors import BY_ONNX
from bf16kit.runtime import Array
from bf16kit.runtime.memory.rebuilt import VIRTUAL_FILE, Weights
from bf16kit.runtime.memory.scratch import ScratchUnavailable, scratch_file
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, WeightStore
from bf16kit.runtime.ort.externaldata import CopiedTensors, Regions


@contextmanager
def copied_weights(
    artifact: Artifact,
    graph: Path,
    scratch: Path | None = None,
    given: Collection[str] = (),
    store: WeightStore = PRIVATE_STORE,
) -> Iterator[Weights]:
    """Yield the weights of ``graph``, one of the artifact's, for a session that is opened within the block.

    Weights whose names are in ``given`` are in the memory of ``store``; they may only be read in the layout in which
    they are stored. The others are in a temporary file in ``scratch`` (None: the system's directory), on disk or in
    memory, which has no name afterwards. Without room for such a file, ONNX Runtime reads all weights from memory, and
    needs twice their size meanwhile.
    """
    tensors = CopiedTensors(graph, given)
    if not tensors.file.size and not tensors.memory.size:
        yield Weights(tensors.graph_at(VIRTUAL_FILE), "in the graph")
        return
    try:
        with scratch_file(max(tensors.file.size, 1), scratch, in_memory=True) as (path, mapped):
            _fill(mapped, artifact, tensors.file)
            del mapped
            model = tensors.graph_at(path.name)
            yield Weights(model, "in a temporary file", base_dir=path.parent, values=_values(artifact, tensors, store))
    except ScratchUnavailable as reason:
        tensors = CopiedTensors(graph)
        buffer = np.empty(tensors.file.size, np.uint8)
        _fill(buffer, artifact, tensors.file)
        where = f"in memory, because {reason}"
        yield Weights(tensors.graph_at(VIRTUAL_FILE), where, files={VIRTUAL_FILE: buffer})


def _values(artifact: Artifact, tensors: CopiedTensors, store: WeightStore) -> dict[str, Array]:
    if not tensors.memory.size:
        return {}

    def fill(memory: NDArray[np.uint8]) -> None:
        _fill(memory, artifact, tensors.memory)
        artifact.verify()  # checks that the files did not change while they were read, before the copy is shared

    memory = store.get(_key(artifact, tensors.memory), tensors.memory.size, fill)
    found: dict[str, Array] = {}
    for tensor, start in tensors.given():
        dtype, shape = BY_ONNX[tensor.data_type].numpy, tuple(tensor.dims)
        found[tensor.name] = memory[start : start + dtype.itemsize * math.prod(shape)].view(dtype).reshape(shape)
    return found


def _key(artifact: Artifact, regions: Regions) -> str:
    """Return a key that is equal for equal bytes, whatever the artifact's name: the files' digests and the regions."""
    files = artifact.manifest.files
    parts = (f"{files[r.location].sha256} {r.offset} {r.nbytes} {start}" for r, start in regions)
    return "\n".join(parts)


def _fill(destination: Array, artifact: Artifact, regions: Regions) -> None:
    for region, start in regions:
        segment = Segment(offset=region.offset, bytes=region.nbytes)
        read_segment(artifact.file(region.location), segment, destination[start : start + region.nbytes])
