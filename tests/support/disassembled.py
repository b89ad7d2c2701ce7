"""Reads the kernel's machine code with objdump, and finds which instruction set extensions each function uses."""

import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_INSTRUCTION = re.compile(r"^\s+[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*\t(\S+)\s*(.*)$")
# Prefixes that may precede the opcode: a segment, as for thread-local variables, and the size of addresses.
_BEFORE = ("26", "2e", "36", "3e", "64", "65", "67")
_EVEX, _VEX = "62", ("c4", "c5")  # in 64-bit code no other instruction begins with these
_TILE = re.compile(r"^(?:tdp\w+|tile\w+|ldtilecfg|sttilecfg)$")
_BF16 = re.compile(r"^v(?:dpbf16ps|cvtne2?ps2bf16[xyz]?)$")

# The namespaces of the code paths, each with the extensions that its processors have.
PATHS = {
    "avx2": {"avx"},
    "avx512": {"avx", "avx512"},
    "avx512_bf16": {"avx", "avx512", "bf16"},
    "amx": {"avx", "avx512", "bf16", "tile"},
}
_PATH = re.compile(rf"\b({'|'.join(PATHS)})::")


def instructions(code: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield (function, bytes, mnemonic, operands) of each instruction in the library or object ``code``."""
    command = ["objdump", "-d", "-w", "-C", str(code)]
    function = ""
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if name := _NAME.match(line):
            function = name[1]
        elif found := _INSTRUCTION.match(line):
            yield function, found[1].strip(), found[2], found[3]


def extensions(encoded: str, mnemonic: str, operands: str) -> set[str]:
    """Return the extensions beyond x86-64 that one instruction needs: of avx, avx512, bf16, tile."""
    first = next((byte for byte in encoded.split() if byte not in _BEFORE), "")
    if _TILE.match(mnemonic):
        return {"tile"}
    needed = {"avx"} if first in (_EVEX, *_VEX) else set()
    if first == _EVEX or "%k" in operands:  # instructions that move masks begin as AVX's do
        needed |= {"avx512"}
    if _BF16.match(mnemonic):
        needed |= {"bf16"}
    return needed


def used(code: Path) -> dict[str, set[str]]:
    """Return the extensions that each function of ``code`` uses, including functions that use none."""
    found: dict[str, set[str]] = defaultdict(set)
    for function, *instruction in instructions(code):
        found[function] |= extensions(*instruction)
    return found


def allowed(function: str) -> set[str]:
    """Return the extensions that ``function`` may use: those of its code path, or none outside all paths."""
    path = _PATH.search(function)
    return PATHS[path[1]] if path else set()


def weak(code: Path) -> set[str]:
    """Return the weak functions of the object ``code``: the linker keeps one copy of each, from any object."""
    lines = subprocess.run(["nm", "-C", str(code)], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for line in lines if line[17:19] == "W " and (name := line[19:].strip())}


def compiled(source: Path, folder: Path, compiler: str, *flags: str) -> Path:
    """Compile ``source`` without optimisation, so that inline functions stay separate, and return the object file."""
    target = folder / f"{source.stem}.o"
    options = ["-std=c++17", "-O0", "-fPIC", "-ffp-contract=off", "-Wno-psabi", *flags]
    subprocess.run([*shlex.split(compiler), *options, "-c", str(source), "-o", str(target)], check=True)
    return target
