"""The weights of a session: copied from an artifact's files, or rebuilt in fp32 for the reference.

A session maps its weights. If an artifact's file were truncated in place (``cp`` over it does that), SIGBUS would kill
every process that maps it. If it were overwritten, outputs would change without another check. So a server copies the
weights: those that serve are those that were verified.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import Segment
from bf16kit.artifact.reading import read_segment
from bf16kit.numerics.tensors import BY_ONNX
from bf16kit.runtime import Array
from bf16kit.runtime.memory.scratch import ScratchUnavailable, scratch_file
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, WeightStore
from bf16kit.runtime.ort.externaldata import REBUILT, GatheredTensors, Move
from bf16kit.runtime.ort.kernel import read_in_place

_VIRTUAL_FILE = "weights"  # the name of a file that does not exist


@dataclass(frozen=True, slots=True)
class Weights:
    """The arguments for opening a session, and a short text that says where the weights are."""

    model: Path | bytes
    where: str
    base_dir: Path | None = None
    files: Mapping[str, Array] = field(default_factory=dict)  # bytes of virtual files, by file name
    values: Mapping[str, Array] = field(default_factory=dict)  # initializers by name, read in place


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
    tensors = GatheredTensors(graph, given, artifact.manifest)
    if not tensors.size and not tensors.given_size:
        yield Weights(tensors.graph_at(_VIRTUAL_FILE), "in the graph")
        return
    # Equal for equal bytes, whatever the artifact's name: the files' digests and the layout.
    files = artifact.manifest.files
    moves = tensors.given_moves
    key = "\n".join(f"{files[m.location].sha256} {m.offset} {m.nbytes} {m.target}" for m in moves)
    with _gathered(artifact, graph, tensors, key, scratch, store, in_memory=True) as found:
        yield found


@contextmanager
def rebuilt_weights(
    artifact: Artifact, graph: Path, scratch: Path | None = None, store: WeightStore | None = None
) -> Iterator[Weights]:
    """Yield the fp32 weights of ``graph``, the artifact's reference, for a session that is opened within the block.

    They are written to a temporary file in ``scratch`` (None: the system's directory) and mapped from there: unlike
    arrays in memory, the system can reclaim its pages. If that is impossible they are kept in memory, which needs twice
    their size while the session is opened. With a ``store``, weights that products and look-ups read in place are in
    its memory.
    """
    tensors = GatheredTensors(graph, () if store is None else read_in_place(graph), artifact.manifest)
    # The manifest determines the layout and the bytes, and its digest is unique to the artifact.
    key = f"the fp32 reference of {hashlib.sha256(artifact.manifest.dumps()).hexdigest()}"
    in_memory = store is not None
    with _gathered(artifact, graph, tensors, key, scratch, store or PRIVATE_STORE, in_memory=in_memory) as found:
        yield found


@contextmanager
def _gathered(
    artifact: Artifact,
    graph: Path,
    tensors: GatheredTensors,
    key: str,
    scratch: Path | None,
    store: WeightStore,
    *,
    in_memory: bool,
) -> Iterator[Weights]:
    try:
        with scratch_file(max(tensors.size, 1), scratch, in_memory=in_memory) as (path, mapped):
            _write(tensors.moves, artifact, mapped)
            del mapped
            values = _values(artifact, tensors, key, store)
            where = "in memory for whoever serves it" if values else "in a temporary file"
            yield Weights(tensors.graph_at(path.name), where, base_dir=path.parent, values=values)
    except ScratchUnavailable as reason:
        tensors = GatheredTensors(graph)
        buffer = np.empty(tensors.size, np.uint8)
        _write(tensors.moves, artifact, buffer)
        where = f"in memory, because {reason}"
        yield Weights(tensors.graph_at(_VIRTUAL_FILE), where, files={_VIRTUAL_FILE: buffer})


def _values(artifact: Artifact, tensors: GatheredTensors, key: str, store: WeightStore) -> dict[str, Array]:
    """Return the initializers in the store's memory, as views."""
    if not tensors.given_size:
        return {}

    def fill(memory: NDArray[np.uint8]) -> None:
        _write(tensors.given_moves, artifact, memory)
        artifact.verify()  # checks that the files did not change while they were read, before the copy is shared

    memory = store.get(key, tensors.given_size, fill)
    found: dict[str, Array] = {}
    for tensor, start in tensors.given():
        dtype, shape = BY_ONNX[tensor.data_type].numpy, tuple(tensor.dims)
        found[tensor.name] = memory[start : start + dtype.itemsize * math.prod(shape)].view(dtype).reshape(shape)
    return found


def _write(moves: Sequence[Move], artifact: Artifact, destination: Array) -> None:
    # Opened again, so that the mappings used to rebuild the weights are dropped with it.
    reader = Artifact(artifact.path, artifact.manifest, artifact.copies)
    for move in moves:
        out = destination[move.target : move.target + move.nbytes]
        if move.location == REBUILT:
            reader.restore(move.name, out.view(np.float32).reshape(reader.shape(move.name)))
        else:
            read_segment(artifact.file(move.location), Segment(offset=move.offset, bytes=move.nbytes), out)
