"""Faults put into the memory of a server that runs: what a cosmic ray, a bad DIMM or a stray pointer would do.

Copied weights lie in private, anonymous memory. They are found there by their bytes (``/proc/PID/maps``) and changed
in place (``/proc/PID/mem``), which a parent may do to its child. Nothing of the server takes part in it. The server's
files stay as they are, and so does what it says of itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from artifacts import write_artifact
from numpy.typing import NDArray
from onnx import helper
from products import product

from bf16kit.artifact import Artifact
from bf16kit.tensors import TensorSpec

LINE = 256  # bytes that are looked for: the beginning of a weight, unlike anything else
_CHUNK = 64 << 20
_LARGEST = 4 << 30  # of one mapping: larger ones are address space that an allocator has reserved


def stored(artifact: Path, tensor: str) -> bytes:
    """The bytes of a weight as the artifact has them, which is as a server's copy has them."""
    opened = Artifact.open(artifact)
    entry = next(each for each in opened.manifest.tensors if each.name == tensor)
    with opened.file(entry.file).open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.bytes)


def write_pair(target: Path, *, width: int = 64) -> Artifact:
    """``y = relu(x·a)·b``, fp32[batch,width] → fp32[batch,width]; both weights of one shape, and read as stored."""
    rng = np.random.default_rng(7)
    weights = {name: rng.standard_normal((width, width)).astype(np.float32) / width**0.5 for name in ("a", "b")}
    kernel = product(weights["a"])
    second = product(weights["b"]).graph.node[0]
    first = kernel.graph.node[0]
    first.input[:], first.output[:] = ["x", "a"], ["hidden"]
    second.input[:], second.output[:] = ["active", "b"], ["y"]
    kernel.graph.node.extend([helper.make_node("Relu", ["hidden"], ["active"]), second])
    return write_artifact(
        target,
        lambda weight: [
            helper.make_node("MatMul", ["x", weight("a")], ["hidden"], name="first"),
            helper.make_node("Relu", ["hidden"], ["active"], name="relu"),
            helper.make_node("MatMul", ["active", weight("b")], ["y"], name="second"),
        ],
        weights,
        [TensorSpec("x", "float32", ("batch", width))],
        [TensorSpec("y", "float32", ("batch", width), "embedding")],
        {"x": rng.standard_normal((4, width)).astype(np.float32)},
        kernel=kernel,
    )


@dataclass(frozen=True)
class Copy:
    """Where a weight lies in a process."""

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
    """Where ``content`` lies whole in the private, anonymous memory of ``process``. AssertionError: nowhere."""
    found = [
        Copy(process, at, len(content))
        for begin, end in _anonymous(process)
        for at in _find(process, begin, end, content[:LINE])
    ]
    found = [copy for copy in found if copy.read() == content]
    assert found, f"process {process} has no copy of these {len(content)} bytes in memory of its own"
    return found


def flip(process: int, content: bytes, *, bit: int = 14, every: int = 61) -> int:
    """Flip one bit of every so many bf16 elements of a weight, in all its copies; how many there were.

    Bit 14 is the highest of the exponent: a weight of 0.1 becomes one of 10³⁷. An odd ``every`` meets every column.
    """
    elements = np.frombuffer(content, np.uint16).copy()
    elements[::every] ^= np.uint16(1 << bit)
    return _replace(process, content, elements)


def swap(process: int, first: bytes, second: bytes) -> int:
    """Let two weights of one shape change places, in all their copies; how many there were."""
    assert len(first) == len(second)
    assert first != second
    places = copies(process, first), copies(process, second)  # both, before either is changed
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
    """The private mappings of no file that may be read."""
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
