"""The kernel's machine code as objdump prints it, and which extensions of the instruction set each function uses."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_INSTRUCTION = re.compile(r"^\s+[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*\t(\S+)\s*(.*)$")
# Prefixes that may come before: a segment, as thread-local variables have, and the size of addresses.
_BEFORE = ("26", "2e", "36", "3e", "64", "65", "67")
_EVEX, _VEX = "62", ("c4", "c5")  # in 64-bit code they begin nothing else
_TILE = re.compile(r"^(?:tdp\w+|tile\w+|ldtilecfg|sttilecfg)$")
_BF16 = re.compile(r"^v(?:dpbf16ps|cvtne2?ps2bf16[xyz]?)$")

# The namespaces of the code paths, each with what its processors have.
PATHS = {
    "avx2": {"avx"},
    "avx512": {"avx", "avx512"},
    "avx512_bf16": {"avx", "avx512", "bf16"},
    "amx": {"avx", "avx512", "tile"},
}
_PATH = re.compile(rf"\b({'|'.join(PATHS)})::")


def instructions(code: Path) -> Iterator[tuple[str, str, str, str]]:
    """(function, bytes, mnemonic, operands) of each instruction in the library or object ``code``."""
    command = ["objdump", "-d", "-w", "-C", str(code)]
    function = ""
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if name := _NAME.match(line):
            function = name[1]
        elif found := _INSTRUCTION.match(line):
            yield function, found[1].strip(), found[2], found[3]


def extensions(encoded: str, mnemonic: str, operands: str) -> set[str]:
    """What a processor must have beyond x86-64 for one instruction: of avx, avx512, bf16, tile."""
    first = next((byte for byte in encoded.split() if byte not in _BEFORE), "")
    if _TILE.match(mnemonic):
        return {"tile"}
    needed = {"avx"} if first in (_EVEX, *_VEX) else set()
    if first == _EVEX or "%k" in operands:  # masks are moved by instructions that begin as AVX's do
        needed |= {"avx512"}
    if _BF16.match(mnemonic):
        needed |= {"bf16"}
    return needed


def used(code: Path) -> dict[str, set[str]]:
    """The extensions that each function of ``code`` uses, none left out."""
    found: dict[str, set[str]] = defaultdict(set)
    for function, *instruction in instructions(code):
        found[function] |= extensions(*instruction)
    return found


def allowed(function: str) -> set[str]:
    """The extensions that ``function`` may use: those of the path in whose namespace it is, if it is in one."""
    path = _PATH.search(function)
    return PATHS[path[1]] if path else set()


def weak(code: Path) -> set[str]:
    """Functions of the object ``code`` that the linker keeps one of, whichever object it finds first."""
    lines = subprocess.run(["nm", "-C", str(code)], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for line in lines if line[17:19] == "W " and (name := line[19:].strip())}


def compiled(source: Path, folder: Path, compiler: str, *flags: str) -> Path:
    """``source`` compiled without optimisation, so that every function that may be inlined stands for itself."""
    target = folder / f"{source.stem}.o"
    options = ["-std=c++17", "-O0", "-fPIC", "-ffp-contract=off", "-Wno-psabi", *flags]
    subprocess.run([*shlex.split(compiler), *options, "-c", str(source), "-o", str(target)], check=True)
    return target
