"""What every source provides: the checkpoint's tensors, the fp32 graph that uses them and, from torch, the module."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bf16kit.artifact.entries import GivenEntry
from bf16kit.messages.errors import SourceError
from bf16kit.numerics.tensors import Array as Array
from bf16kit.numerics.tensors import TensorSpec

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

Feeds = dict[str, Array]
Sampler = Callable[[int, int], Iterator[Feeds]]  # (seed, count) → plausible feeds
FP32_ROUNDOFF = 2.0**-24
CHANGED = "bf16kit.changed"  # of a graph's ``meta``: names of the module's tensors that running it changes

_CHUNK = 1 << 20
_NOT_IN_NAMES = re.compile(r"[\x00-\x1f/\\]")  # characters that no name in a manifest may have


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a source as they are stored there, memory-mapped where the format allows.

    ``shards`` are the tensors' names by file, for a source of several files. ``orders`` gives the order of axes, by
    tensor, where the model holds them permuted other than by a transpose and the reader knows how.
    """

    format: str
    sha256: str
    tensors: Mapping[str, Array]
    shards: Sequence[Sequence[str]] = ()
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors at their own dtypes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A module that takes positional tensors in the order of ``inputs`` and returns a tuple in that of ``outputs``.

    ``left_out`` names outputs that the module computes and that are not served. ``script`` is the source's
    ScriptModule, if the source is one.
    """

    module: torch.nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    example: tuple[torch.Tensor, ...]
    left_out: tuple[str, ...] = ()
    script: Any = None


@dataclass(frozen=True, slots=True)
class Oracle:
    """The source itself, which answers feeds as it did before the conversion changed anything.

    ``outputs`` yields the source's outputs by name, for one feed after the other, and releases what it holds at its
    end. It raises :class:`RuntimeFailure` if the source does not run. ``how`` is a phrase for messages that says
    what computes the outputs. ``roundoff`` is the unit roundoff of the least precise arithmetic the source uses.
    """

    outputs: Callable[[Sequence[Feeds]], Iterator[Feeds]]
    how: str
    roundoff: float = FP32_ROUNDOFF

    def __call__(self, feeds: Sequence[Feeds]) -> list[Feeds]:
        """Return all outputs at once; for few and small ones."""
        return list(self.outputs(feeds))


@dataclass(slots=True)
class Source:
    """A checkpoint made runnable, with an oracle that tells the source's own answers.

    ``graph`` is fp32; its initializers are views of the checkpoint's memory wherever they hold the same bytes. It is
    None if torch has no graph that ONNX can express. Then ``no_graph_reason`` says why, and ``rowwise`` says whether
    each row's outputs depend on that row alone. ``module`` is None for sources that torch cannot trace. The pipeline
    drops ``module`` and ``oracle`` as soon as they are used, which frees their files and memory. A source that cannot
    answer has no oracle, and ``no_oracle_reason`` says why. ``notes`` are sentences for the user. ``tools`` are the
    packages whose versions shape the graph, ``foreign_versions`` the versions of packages in another Python.
    ``export_files`` are files that an export in the source's own format stores beside its weights. ``given``
    are files besides the checkpoint that shaped the source.
    """

    checkpoint: Checkpoint
    graph: ir.Model | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    module: TorchModel | None = None
    sampler: Sampler | None = None
    tools: tuple[str, ...] = ()
    oracle: Oracle | None = None
    no_oracle_reason: str = "sources of this kind cannot be run"
    notes: tuple[str, ...] = ()
    export_files: Mapping[str, bytes] = field(default_factory=dict)
    foreign_versions: Mapping[str, str] = field(default_factory=dict)
    no_graph_reason: str = ""
    rowwise: bool = True
    given: tuple[GivenEntry, ...] = ()


def digest_files(paths: Sequence[Path], advance: Callable[[int], None]) -> str:
    """Return the sha256 of one file's bytes or, for several files, of their names and digests.

    ``advance`` is called with the number of bytes read.
    """
    digests = [_digest(path, advance) for path in paths]
    if len(digests) == 1:
        return digests[0]
    lines = "".join(f"{digest}  {path.name}\n" for path, digest in zip(paths, digests, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def digest_tensors(tensors: Mapping[str, Array]) -> str:
    """Return the sha256 over names, dtypes, shapes and bytes of all ``tensors``, in order of their names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name}\0{tensors[name].dtype.name}\0{tensors[name].shape}\n".encode())
        found.update(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def given_entry(option: Literal["--map", "--model"], path: Path) -> GivenEntry:
    """Return the manifest's entry for the file at ``path``, which ``option`` named."""
    digest = _digest(path, lambda _: None)
    name = _NOT_IN_NAMES.sub("_", path.name.encode("utf-8", "replace").decode())
    return GivenEntry(option=option, name=name, sha256=digest, bytes=path.stat().st_size)


def _digest(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                advance(len(chunk))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()
