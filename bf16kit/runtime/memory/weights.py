"""The weights of a session: copied from an artifact's files, or rebuilt in fp32 for the reference.

A session maps its weights. If an artifact's file were truncated in place (``cp`` over it does that), SIGBUS would kill
every process that maps it; if it were overwritten, outputs would change unchecked. So a server copies the weights.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import Segment
from bf16kit.artifact.reading import read_segment
from bf16kit.artifact.weightfile import ALIGNMENT
from bf16kit.messages.errors import ArtifactError
from bf16kit.numerics.tensors import BY_ONNX
from bf16kit.runtime import Array
from bf16kit.runtime.memory.scratch import ScratchUnavailable, scratch_file
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, WeightStore
from bf16kit.runtime.ort.onnxgraph import REBUILT, all_tensors, check_locations, locations, read_in_place

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

_VIRTUAL_FILE = "weights"  # the name of a file that does not exist


@dataclass(frozen=True, slots=True)
class Weights:
    """A graph and its weights, to open a session with, and a short text that says where they are."""

    model: Path | bytes
    where: str
    base_dir: Path | None = None
    files: Mapping[str, Array] = field(default_factory=dict)  # bytes of virtual files, by file name
    values: Mapping[str, Array] = field(default_factory=dict)  # initializers by name, read in place

    @property
    def options(self) -> dict[str, Any]:
        """The options of :func:`~bf16kit.runtime.ort.session.open_session` that say where the weights are."""
        return {"base_dir": self.base_dir, "files": self.files, "values": self.values}


def rebuilt_weights(
    artifact: Artifact, graph: Path, scratch: Path | None = None, store: WeightStore | None = None
) -> AbstractContextManager[Weights]:
    """Yield the fp32 weights of ``graph``, the artifact's reference, for a session that is opened within the block.

    They are mapped from a temporary file, whose pages the system can reclaim, or else in memory: see
    :func:`gathered_weights`. With a ``store``, weights that products and look-ups read in place are in its memory.
    """
    model = check_locations(graph, {*artifact.manifest.files, REBUILT})
    given = () if store is None else read_in_place(model, products=True)
    return gathered_weights(artifact, model, scratch, given, store or PRIVATE_STORE, in_memory=store is not None)


class _Place(NamedTuple):
    """Where a tensor is. Tensors that share their bytes have one place, and are gathered once."""

    location: str
    offset: int
    nbytes: int
    rebuilt: str  # the name of a tensor that is rebuilt


@contextmanager
def gathered_weights(
    artifact: Artifact,
    graph: ModelProto,
    scratch: Path | None,
    given: Collection[str],
    store: WeightStore,
    *,
    in_memory: bool = True,
) -> Iterator[Weights]:
    """Yield copies of the weights of ``graph``, one of the artifact's, for a session that is opened within the block.

    ``graph`` has passed :func:`check_locations`; it is changed. Weights whose names are in ``given`` are in the memory
    of ``store``; they may only be read in the layout in which they are stored. The others are in a temporary file in
    ``scratch`` (None: the system's directory), on disk or, if ``in_memory``, in memory, which has no name afterwards.
    Without room for such a file, ONNX Runtime reads all weights from memory, and needs twice their size meanwhile.
    """
    places = list(_places(artifact, graph))
    if not places:
        yield Weights(graph.SerializeToString(), "in the graph")
        return
    # A subgraph or a function may reuse a name: then its tensor cannot be told from the main graph's.
    times = Counter(tensor.name for tensor, _ in places)
    names = {name for name in given if times[name] == 1}
    held = [(tensor, place) for tensor, place in places if tensor.name in names]
    offsets, size = _laid_out(place for tensor, place in places if tensor.name not in names)
    try:
        with scratch_file(max(size, 1), scratch, in_memory=in_memory) as (path, mapped):
            _write(artifact, offsets, mapped)
            del mapped
            values = _values(artifact, held, store) if held else {}
            where = "in memory for whoever serves it" if values else "in a temporary file"
            yield Weights(_referring(graph, places, offsets, path.name), where, base_dir=path.parent, values=values)
    except ScratchUnavailable as reason:
        offsets, size = _laid_out(place for _, place in places)
        buffer = np.empty(size, np.uint8)
        _write(artifact, offsets, buffer)
        model = _referring(graph, places, offsets, _VIRTUAL_FILE)
        yield Weights(model, f"in memory, because {reason}", files={_VIRTUAL_FILE: buffer})


def _places(artifact: Artifact, graph: ModelProto) -> Iterator[tuple[TensorProto, _Place]]:
    """Yield the tensors that are in files; ArtifactError, before anything is allocated, if one cannot be there."""
    rebuilt = {entry.name: 4 * math.prod(entry.shape) for entry in artifact.manifest.tensors}
    for tensor in filter(locations, all_tensors(graph)):
        values = {entry.key: entry.value for entry in tensor.external_data}
        location, known = values["location"], BY_ONNX.get(tensor.data_type)
        name = tensor.name if location == REBUILT else ""
        held = rebuilt.get(name, 0) if name else artifact.manifest.files[location].bytes
        try:
            offset = int(values.get("offset", "0"))
            nbytes = int(values.get("length", "0")) if known is None else known.numpy.itemsize * math.prod(tensor.dims)
            if known is not None:  # a ValueError for what no array can have: [0, 2⁶²], or 65 dimensions
                np.broadcast_to(np.zeros((), known.numpy), tensor.dims)
        except ValueError:
            offset = nbytes = -1
        if min(offset, nbytes, *tensor.dims) < 0 or offset + nbytes > held:
            raise ArtifactError(
                f"{artifact.path}: tensor {tensor.name!r} of shape {list(tensor.dims)} is no part of {location!r},"
                f" which has {held} bytes for it; convert the checkpoint again"
            )
        yield tensor, _Place(location, offset, nbytes, name)


def _laid_out(places: Iterable[_Place]) -> tuple[dict[_Place, int], int]:
    """Return the offsets of distinct places, one after the other and aligned, in the order of their files; the size."""
    offsets, size = dict[_Place, int](), 0
    for place in sorted(set(places)):
        offsets[place] = size
        size += place.nbytes + -place.nbytes % ALIGNMENT
    return offsets, size


def _referring(
    graph: ModelProto, places: Iterable[tuple[TensorProto, _Place]], offsets: Mapping[_Place, int], location: str
) -> bytes:
    """Return the graph with its tensors in the file ``location`` beside it.

    ONNX Runtime requires this file to exist for the tensors in memory, too, but does not read them from it.
    """
    for tensor, place in places:
        del tensor.external_data[:]
        for key, value in (("location", location), ("offset", offsets.get(place, 0)), ("length", place.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
    return graph.SerializeToString()


def _values(artifact: Artifact, held: Collection[tuple[TensorProto, _Place]], store: WeightStore) -> dict[str, Array]:
    """Return the initializers ``held``, in the store's memory, as views."""
    offsets, size = _laid_out(place for _, place in held)
    # Equal for equal bytes, whatever the artifact's name: the files' digests and the layout.
    digests = {name: entry.sha256 for name, entry in artifact.manifest.files.items()}
    digests[REBUILT] = hashlib.sha256(artifact.manifest.dumps()).hexdigest()
    key = "\n".join(f"{digests[p.location]} {p.offset} {p.nbytes} {p.rebuilt} {at}" for p, at in offsets.items())

    def fill(memory: NDArray[np.uint8]) -> None:
        _write(artifact, offsets, memory)
        artifact.verify()  # checks that the files did not change while they were read, before the copy is shared

    memory = store.get(key, size, fill)
    flat = {p: memory[at : at + p.nbytes] for p, at in offsets.items()}
    return {t.name: flat[p].view(BY_ONNX[t.data_type].numpy).reshape(tuple(t.dims)) for t, p in held}


def _write(artifact: Artifact, offsets: Mapping[_Place, int], destination: Array) -> None:
    # Opened again, so that the mappings used to rebuild the weights are dropped with it.
    reader = Artifact(artifact.path, artifact.manifest, artifact.copies)
    for (location, offset, nbytes, name), start in offsets.items():
        out = destination[start : start + nbytes]
        if location == REBUILT:
            reader.restore(name, out.view(np.float32).reshape(reader.shape(name)))
        else:
            read_segment(artifact.file(location), Segment(offset=offset, bytes=nbytes), out)
