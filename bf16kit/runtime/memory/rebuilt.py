"""Rebuilds the reference's fp32 weights for ONNX Runtime: in a temporary file, or in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import Segment
from bf16kit.artifact.reading import read_segment
from bf16kit.runtime import Array
from bf16kit.runtime.memory.scratch import ScratchUnavailable, scratch_file
from bf16kit.runtime.memory.weightstore import WeightStore
from bf16kit.runtime.ort.externaldata import REBUILT, GatheredTensors, Move, initializers
from bf16kit.runtime.ort.inplace import read_in_place

VIRTUAL_FILE = "weights"  # the name of a file that does not exist


@dataclass(frozen=True, slots=True)
class Weights:
    """The arguments for opening a session, and a short text that says where the weights are."""

    model: Path | bytes
    where: str
    base_dir: Path | None = None
    external: Mapping[str, Array] = field(default_factory=dict)  # initializers by name
    files: Mapping[str, Array] = field(default_factory=dict)  # bytes of virtual files, by file name
    values: Mapping[str, Array] = field(default_factory=dict)  # initializers by name, read in place


@contextmanager
def rebuilt_weights(
    artifact: Artifact, graph: Path, scratch: Path | None = None, store: WeightStore | None = None
) -> Iterator[Weights]:
    """Yield the weights of ``graph``, the artifact's reference, for a session that is opened within the block.

    They are written to a temporary file in ``scratch`` (None: the system's directory) and mapped from there. If that is
    impossible they are kept in memory, which needs twice their size while the session is opened. With a ``store``,
    weights that products and look-ups read in place are in its memory.
    """
    gathered = GatheredTensors(graph, () if store is None else read_in_place(graph))
    try:
        with scratch_file(max(gathered.size, 1), scratch, in_memory=store is not None) as (path, mapped):
            _write(gathered.moves, artifact, mapped)
            del mapped
            where = "in a temporary file" if store is None else "in memory for whoever serves it"
            values = {} if store is None else _values(artifact, gathered, store)
            yield Weights(gathered.graph_at(path.name), where, base_dir=path.parent, values=values)
    except ScratchUnavailable as reason:
        gathered = GatheredTensors(graph)
        if artifact.copies:  # a session that opens the graph by its path also maps the other files that the graph names
            buffer = np.empty(gathered.size, np.uint8)
            _write(gathered.moves, artifact, buffer)
            where = f"in memory, because {reason}"
            yield Weights(gathered.graph_at(VIRTUAL_FILE), where, files={VIRTUAL_FILE: buffer})
            return
        reader = _reader(artifact)
        arrays = {name: reader.restore(name) for name in initializers(graph, REBUILT)}
        yield Weights(graph, f"in memory, because {reason}", external=arrays)


def _values(artifact: Artifact, gathered: GatheredTensors, store: WeightStore) -> dict[str, Array]:
    """Return the initializers in the store's memory, as views."""
    if not gathered.given_size:
        return {}

    def fill(memory: NDArray[np.uint8]) -> None:
        _write(gathered.given_moves, artifact, memory)
        artifact.verify()  # checks that the files did not change while they were read, before the copy is shared

    # The manifest determines the layout and the bytes, and its digest is unique to the artifact.
    key = f"the fp32 reference of {hashlib.sha256(artifact.manifest.dumps()).hexdigest()}"
    memory = store.get(key, gathered.given_size, fill)
    shapes = gathered.shapes()
    return {
        move.name: memory[move.target : move.target + move.nbytes].view(np.float32).reshape(shapes[move.name])
        for move in gathered.given_moves
    }


def _write(moves: Iterable[Move], artifact: Artifact, mapped: Array) -> None:
    reader = _reader(artifact)
    for move in moves:
        destination = mapped[move.target : move.target + move.nbytes]
        if move.location == REBUILT:
            shape = reader.shape(move.name)
            reader.restore(move.name, destination.view(np.float32).reshape(shape))
        else:
            segment = Segment(offset=move.offset, bytes=move.nbytes)
            read_segment(artifact.file(move.location), segment, destination)


def _reader(artifact: Artifact) -> Artifact:
    """Open the artifact again, so that the mappings used to rebuild the weights are dropped with it."""
    return Artifact(artifact.path, artifact.manifest, artifact.copies)
