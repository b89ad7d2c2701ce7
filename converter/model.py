"""What every source gives: the checkpoint's tensors, the fp32 graph that uses them, and, from torch, the module."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bf16kit.entries import GivenEntry
from bf16kit.errors import SourceError
from bf16kit.tensors import Array as Array
from bf16kit.tensors import TensorSpec

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

Feeds = dict[str, Array]
Sampler = Callable[[int, int], Iterator[Feeds]]  # (seed, count) → plausible feeds
FP32_ROUNDOFF = 2.0**-24

_CHUNK = 1 << 20
_UNPLAIN = re.compile(r"[\x00-\x1f/\\]")  # what no name in a manifest has


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a source as they are stored there, memory-mapped where the format allows.

    ``shards`` are their names by file, where a source is parted into several.
    ``orders`` has those whose axes the model holds in another order than transposed, where the reader knows it.
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

    ``left_out`` names what the module computes and nobody is served. ``script`` is the ScriptModule that it follows,
    where the source is one.
    """

    module: torch.nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    example: tuple[torch.Tensor, ...]
    left_out: tuple[str, ...] = ()
    script: Any = None


@dataclass(frozen=True, slots=True)
class Oracle:
    """The source itself, answering feeds as it did before anything was done to it.

    ``answers`` yields the outputs by name for each feed in turn, as the source computes them; whatever it holds is let
    go of when it ends. It raises :class:`~bf16kit.errors.RuntimeFailure` when the source does not run. ``how`` says for
    people who answers. ``roundoff`` is the unit roundoff of the least precise arithmetic the source itself computes in.
    """

    answers: Callable[[Sequence[Feeds]], Iterator[Feeds]]
    how: str
    roundoff: float = FP32_ROUNDOFF

    def __call__(self, feeds: Sequence[Feeds]) -> list[Feeds]:
        """All answers at once, for few and small ones."""
        return list(self.answers(feeds))


@dataclass(slots=True)
class Source:
    """A checkpoint made runnable, and the model itself to ask what it answers.

    ``graph`` is fp32; its initializers are views of the checkpoint's memory wherever they hold the same bytes. It is
    None where torch has none that ONNX could say: ``ungraphed`` says why, and ``rowwise`` whether what a row is given
    may depend on that row alone.
    ``module`` is None for sources that torch cannot trace; the pipeline drops it as soon as it was traced, and
    ``oracle`` with it, which frees their files and memory. A source that cannot answer has no oracle, and ``unasked``
    says why. ``notes`` are sentences for whoever converts it. ``tools`` are the packages whose versions shape the
    graph, ``foreign`` the versions of those that another Python has. ``beside`` are files that an export in the
    source's own format has beside its weights. ``proposed`` is the map by which weights were placed, as a file of
    rules, until samples have confirmed it. ``given`` are files that shaped it besides the checkpoint.
    """

    checkpoint: Checkpoint
    graph: ir.Model | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    module: TorchModel | None = None
    sampler: Sampler | None = None
    tools: tuple[str, ...] = ()
    oracle: Oracle | None = None
    unasked: str = "sources of this kind cannot be run"
    notes: tuple[str, ...] = ()
    beside: Mapping[str, bytes] = field(default_factory=dict)
    proposed: str | None = None
    foreign: Mapping[str, str] = field(default_factory=dict)
    ungraphed: str = ""
    rowwise: bool = True
    given: tuple[GivenEntry, ...] = ()


def digest_files(paths: Sequence[Path], advance: Callable[[int], None]) -> str:
    """sha256 of one file's bytes; of several, that of their names and digests. ``advance`` is told of bytes read."""
    digests = [_digest(path, advance) for path in paths]
    if len(digests) == 1:
        return digests[0]
    lines = "".join(f"{digest}  {path.name}\n" for path, digest in zip(paths, digests, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def given_file(option: Literal["--map", "--model"], path: Path) -> GivenEntry:
    """What the manifest says of the file at ``path``, which ``option`` named."""
    digest = _digest(path, lambda _: None)
    name = _UNPLAIN.sub("_", path.name.encode("utf-8", "replace").decode())
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
