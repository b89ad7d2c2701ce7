"""The parts that a conversion may need on this machine: whether each is there, and the command that installs it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bf16kit.messages import errors

_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # as /proc/cpuinfo spells them
_BF16 = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True, slots=True)
class Part:
    """One part: ``found`` describes it ("" if missing); ``remedy`` then says what to run or do."""

    name: str
    found: str
    remedy: str = ""


def parts() -> dict[str, Part]:
    """Return every part of :data:`CHECKS`, by name. Nothing large is imported; a check that fails counts as missing."""
    return {name: check(name) for name, check in CHECKS.items()}


def _package(*names: str, extra: str) -> Callable[[str], Part]:
    """Return a check for one of the packages ``names`` in this Python; bf16kit's ``extra`` installs it."""

    def check(name: str) -> Part:
        from converter.process import versions

        found = next((v for v in map(versions.version_of, names) if v is not None), "")
        return Part(name, found, "" if found else f"pip install 'bf16kit[{extra}]'")

    return check


def _python(name: str) -> Part:
    from bf16kit import __version__

    return Part(name, f"{platform.python_version()}, bf16kit {__version__}")


def _processor(name: str) -> Part:
    """Return the instruction sets of this CPU that matter for speed."""
    found: set[str] = set()
    for line in _lines(Path("/proc/cpuinfo")):
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):
            found = set(flags.split())
            break
    own = ", ".join(flag for flag in _INSTRUCTIONS if flag in found) or "none of " + ", ".join(_INSTRUCTIONS)
    emulated = "" if found.intersection(_BF16) else "; bf16 products are emulated in fp32"
    return Part(name, f"{platform.machine()} with {own}{emulated}")


def _kernel(name: str) -> Part:
    from bf16kit.runtime.ort import kernel

    try:
        found = kernel.configured_kernel()
    except errors.ConfigError as error:
        return Part(name, "", str(error))
    return Part(name, found.path, "" if found.path else f"{found.note}: {found.advice}")


def _compiler(name: str) -> Part:
    command = os.environ.get("CXX", "") or "g++"
    found = next((path for path in map(shutil.which, (command, "c++", "clang++")) if path), "")
    return Part(name, found, "" if found else "apt-get install g++ (on Debian), then install bf16kit again")


def _tensorflow(name: str) -> Part:
    from converter.read.tensorflow import process

    try:
        found = process.find()
    except errors.UsageError as error:
        return Part(name, "", str(error))
    if found.missing:
        return Part(name, "", "\n".join(process.PREPARE))
    versions = ", ".join(f"{package} {found.versions[package]}" for package in ("tensorflow", "tf2onnx"))
    return Part(name, f"{versions} in {found.python}")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


# One line each, in the order of the report. A part that a new source or format needs gets its line here.
CHECKS: Mapping[str, Callable[[str], Part]] = {
    "python": _python,
    "processor": _processor,
    "CPU kernel": _kernel,
    "C++ compiler": _compiler,
    "onnxruntime": _package("onnxruntime", "onnxruntime-gpu", extra="cpu"),
    "onnxscript": _package("onnxscript", extra="convert"),
    "torch": _package("torch", extra="convert"),
    "transformers": _package("transformers", extra="hf"),
    "lightning": _package("lightning", extra="lightning"),
    "tensorstore": _package("tensorstore", extra="orbax"),
    "TensorFlow": _tensorflow,
}
