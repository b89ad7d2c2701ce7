"""The weights of a profile, copied where nobody but this process reaches them: what serves is what was verified.

A session maps its weights. Who cuts an artifact's file short in place (``cp`` over it does) would end every process
that maps it, by SIGBUS, and who writes to it would change answers that nobody looks at again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bf16kit.artifact import Artifact
from bf16kit.entries import Segment
from bf16kit.reading import read_segment
from bf16kit.runtime import Array
from bf16kit.runtime.externaldata import JoinedFiles
from bf16kit.runtime.rebuilt import VIRTUAL_FILE, Weights
from bf16kit.runtime.scratch import NoScratch, scratch_file


@contextmanager
def copied(artifact: Artifact, graph: Path, scratch: Path | None = None) -> Iterator[Weights]:
    """The weights of ``graph``, one of the artifact's, for a session that is opened within the block.

    They are in a temporary file in ``scratch`` (None: the system's directory), on a disk or in memory, that has no name
    afterwards; where there is no room for one, ONNX Runtime takes them from memory, twice as much of it meanwhile.
    """
    joined = JoinedFiles(graph, {name: entry.bytes for name, entry in artifact.manifest.files.items()})
    if not joined.size:
        yield Weights(joined.graph_at(VIRTUAL_FILE), "in the graph")
        return
    try:
        with scratch_file(joined.size, scratch, in_memory=True) as (path, mapped):
            _fill(mapped, artifact, joined)
            del mapped
            yield Weights(joined.graph_at(path.name), "in a temporary file", base_dir=path.parent)
    except NoScratch as reason:
        buffer = np.empty(joined.size, np.uint8)
        _fill(buffer, artifact, joined)
        yield Weights(joined.graph_at(VIRTUAL_FILE), f"in memory, because {reason}", files={VIRTUAL_FILE: buffer})


def _fill(place: Array, artifact: Artifact, joined: JoinedFiles) -> None:
    for name, start in joined.files.items():
        nbytes = artifact.manifest.files[name].bytes
        read_segment(artifact.file(name), Segment(offset=0, bytes=nbytes), place[start : start + nbytes])
