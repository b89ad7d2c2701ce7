"""``bf16-convert doctor``: what is installed, what can be converted with it, and how to install the rest."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bf16kit.messages import errors
from converter.commands.common import debug_option, echo, json_option

_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # as /proc/cpuinfo spells them
_FLAGS = ("flags", "Features")
_BF16 = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True, slots=True)
class Part:
    """Something that a conversion may need: ``found`` describes it ("" if missing), ``remedy`` says how to get it."""

    name: str
    found: str
    remedy: str = ""


@click.command()
@json_option
@debug_option
def doctor(as_json: bool, debug: bool) -> None:
    """Show what is installed, what can be converted now, and the commands that install what is missing."""
    from bf16kit.messages import document

    found = parts()
    echo(document.dumps(record(found)) if as_json else describe(found))


def parts() -> dict[str, Part]:
    """Return every part of :data:`CHECKS`, by name. Nothing large is imported; a check that fails counts as missing."""
    return {name: check(name) for name, check in CHECKS.items()}


def record(found: Mapping[str, Part]) -> dict[str, Any]:
    """Return everything as docs/json.md describes it."""
    return {
        "version": 1,
        "installed": [{"name": part.name, "found": part.found, "remedy": part.remedy} for part in found.values()],
        **{
            key: _abilities(needs, found)
            for key, needs in (("sources", SOURCES), ("formats", FORMATS), ("others", OTHERS))
        },
    }


def describe(found: Mapping[str, Part]) -> str:
    """Return tables of what is installed, read and written, and the commands that install what is missing."""
    from bf16kit.messages.wording import table

    tables = (
        ("Sources that can be converted now", "source", SOURCES),
        ("Formats that can be written now", "format", FORMATS),
        ("Other things that can be done now", "what", OTHERS),
    )
    sections = [
        table("Installed", ("part", "found"), [(part.name, part.found or "missing") for part in found.values()])
    ]
    for title, column, needs in tables:
        rows = [
            (ability["name"], "yes" if ability["possible"] else f"no: needs {', '.join(ability['missing'])}")
            for ability in _abilities(needs, found)
        ]
        sections.append(table(title, (column, "now"), rows))
    return "\n\n".join((*sections, *_remedies([part for part in found.values() if not part.found])))


def _abilities(needs: Mapping[str, Sequence[str]], found: Mapping[str, Part]) -> list[dict[str, Any]]:
    missing = {name: [part for part in needed if not found[part].found] for name, needed in needs.items()}
    return [{"name": name, "possible": not parts, "missing": parts} for name, parts in missing.items()]


def _remedies(missing: Sequence[Part]) -> Iterator[str]:
    if not missing:
        yield "Nothing is missing."
        return
    lines = ["To install the missing parts"]
    for part in missing:
        lines += [f"  {part.name}:", *(f"    {line}" for line in part.remedy.splitlines())]
    yield "\n".join(lines)


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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next((text for line in lines for key, _, text in [line.partition(":")] if key.strip() in _FLAGS), "")
    found = set(flags.split())
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
    from converter.read.tensorflow import reader

    try:
        found = reader.find()
    except errors.UsageError as error:
        return Part(name, "", str(error))
    if found.missing:
        return Part(name, "", "\n".join(reader.PREPARE))
    versions = ", ".join(f"{package} {found.versions[package]}" for package in ("tensorflow", "tf2onnx"))
    return Part(name, f"{versions} in {found.python}")


# One line each, in the order of the report. A part that a new source or format needs gets its line here.
CHECKS: Mapping[str, Callable[[str], Part]] = {
    "python": _python,
    "processor": _processor,
    "CPU kernel": _kernel,
    "C++ compiler": _compiler,
    "onnxruntime": _package("onnxruntime", "onnxruntime-gpu", extra="cpu"),
    "onnxscript": _package("onnxscript", extra="convert"),
    "jinja2": _package("jinja2", extra="convert"),
    "matplotlib": _package("matplotlib", extra="convert"),
    "torch": _package("torch", extra="convert"),
    "transformers": _package("transformers", extra="hf"),
    "lightning": _package("lightning", extra="lightning"),
    "tensorstore": _package("tensorstore", extra="jax"),
    "msgpack": _package("msgpack", extra="jax"),
    "TensorFlow": _tensorflow,
}
_ONNX = ("onnxruntime", "onnxscript")
_TORCH = (*_ONNX, "torch")
# The parts that each source, written format and other ability needs, one line each.
SOURCES: Mapping[str, Sequence[str]] = {
    "ONNX": _ONNX,
    "Hugging Face directory": (*_TORCH, "transformers"),
    "safetensors": _TORCH,
    "torch state dict": _TORCH,
    "TorchScript": _TORCH,
    "torch.export program (.pt2)": _TORCH,
    "Lightning checkpoint": _TORCH,
    "Orbax (JAX) checkpoint": (*_TORCH, "tensorstore"),
    "Flax msgpack": (*_TORCH, "msgpack"),
    "TensorFlow SavedModel": (*_ONNX, "TensorFlow"),
    "Keras model (.keras)": (*_ONNX, "TensorFlow"),
}
FORMATS: Mapping[str, Sequence[str]] = {
    "onnx": _ONNX,
    "torchscript": _TORCH,
    "pt2": _TORCH,
    "safetensors": _ONNX,
    "hf": (*_TORCH, "transformers"),
}
OTHERS: Mapping[str, Sequence[str]] = {
    "the report (all but --no-report)": ("jinja2", "matplotlib"),
    "bf16-convert recover": _TORCH,
    "a LightningModule as --model": (*_TORCH, "lightning"),
}
