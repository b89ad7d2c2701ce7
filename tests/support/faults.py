"""Injects faults into the memory of a running server, like those of a cosmic ray, a bad DIMM or a stray pointer.

Copied weights are stored in private, anonymous memory. This module finds them there by their bytes
(``/proc/PID/maps``) and changes them in place (``/proc/PID/mem``), which a parent may do to its child. No code of the
server takes part. The server's files do not change, and neither does what the server reports about itself.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from artifacts import write_artifact
from numpy.typing import NDArray
from products import product

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.numerics.tensors import TensorSpec

LINE = 256  # bytes to search for: the beginning of a weight, which occurs nowhere else
_CHUNK = 64 << 20
_LARGEST = 4 << 30  # bytes of one mapping; larger ones are address space that an allocator has reserved


def stored(artifact: Path, tensor: str) -> bytes:
    """Return the bytes of a weight in the artifact, which are also the bytes of a server's copy."""
    opened = Artifact.open(artifact)
    entry = next(each for each in opened.manifest.tensors if each.name == tensor)
    with opened.file(entry.file).open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.bytes)


def write_pair(target: Path, *, width: int = 64) -> Artifact:
    """Publish ``y = relu(x·a)·b``, fp32[batch,width] → fp32[batch,width].

    Both weights have the same shape, and the kernel reads them as stored.
    """
    rng = np.random.default_rng(7)
    weights = {name: rng.standard_normal((width, width)).astype(np.float32) / width**0.5 for name in ("a", "b")}
    kernel = product(weights["a"])
    second = product(weights["b"]).graph.node[0]
    first = kernel.graph.node[0]
    first.input[:], first.output[:] = ["x", "a"], ["hidden"]
    second.input[:], second.output[:] = ["active", "b"], ["y"]
    kernel.graph.node.extend([*graphs.nodes("active = Relu (hidden)"), second])
    return write_artifact(
        target,
        lambda weight: (
            f"""[first] hidden = MatMul (x, {weight("a")}) [relu] active = Relu (hidden)
            [second] y = MatMul (active, {weight("b")})"""
        ),
        weights,
        [TensorSpec("x", "float32", ("batch", width))],
        [TensorSpec("y", "float32", ("batch", width), "embedding")],
        {"x": rng.standard_normal((4, width)).astype(np.float32)},
        kernel=kernel,
    )


@dataclass(frozen=True)
class Copy:
    """Where a weight is stored in the memory of a process."""

    process: int
    at: int
    size: int

    def read(self) -> bytes:
        with _memory(self.process) as file:
            return os.pread(file, self.size, self.at)

    def write(self, content: bytes) -> None:
        assert len(content) == self.size, (len(content), self.size)
        with _memory(self.process, os.O_RDWR) as file:
            assert os.pwrite(file, content, self.at) == self.size


def copies(process: int, content: bytes) -> list[Copy]:
    """Return where ``content`` is stored whole in the private, anonymous memory of ``process``.

    Raises AssertionError if it is stored nowhere.
    """
    found = [
        Copy(process, at, len(content))
        for begin, end in _anonymous(process)
        for at in _find(process, begin, end, content[:LINE])
    ]
    found = [copy for copy in found if copy.read() == content]
    assert found, f"process {process} has no copy of these {len(content)} bytes in memory of its own"
    return found


def flip(process: int, content: bytes, *, bit: int = 14, every: int = 61) -> int:
    """Flip one bit in one of ``every`` bf16 elements of a weight, in all its copies. Return the number of copies.

    Bit 14 is the highest of the exponent: a weight of 0.1 becomes one of about 10³⁷. With an odd ``every``, elements of
    every column change.
    """
    elements = np.frombuffer(content, np.uint16).copy()
    elements[::every] ^= np.uint16(1 << bit)
    return _replace(process, content, elements)


def swap(process: int, first: bytes, second: bytes) -> int:
    """Swap two weights of the same shape, in all their copies. Return the number of copies."""
    assert len(first) == len(second)
    assert first != second
    places = copies(process, first), copies(process, second)  # find both before either is changed
    for here, other in zip(places, (second, first), strict=True):
        for copy in here:
            copy.write(other)
    return sum(map(len, places))


def _replace(process: int, content: bytes, changed: NDArray[np.uint16]) -> int:
    places = copies(process, content)
    for copy in places:
        copy.write(changed.tobytes())
    return len(places)


def _anonymous(process: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each readable private mapping without a file, up to ``_LARGEST`` bytes."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        where, access, _, _, inode, *name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in where.split("-"))
        private = access[0] == "r" and access[3] == "p" and inode == "0"
        if private and end - begin <= _LARGEST and (not name or name[0] in ("[heap]",) or name[0].startswith("[anon")):
            yield begin, end


def _find(process: int, begin: int, end: int, line: bytes) -> Iterator[int]:
    with _memory(process) as file:
        for start in range(begin, end, _CHUNK):
            length = min(_CHUNK + len(line) - 1, end - start)
            try:
                chunk = os.pread(file, length, start)
            except OSError:  # it was unmapped meanwhile
                continue
            at = chunk.find(line)
            while at >= 0:
                yield start + at
                at = chunk.find(line, at + 1)


@contextmanager
def _memory(process: int, flags: int = os.O_RDONLY) -> Iterator[int]:
    file = os.open(f"/proc/{process}/mem", flags)
    try:
        yield file
    finally:
        os.close(file)
