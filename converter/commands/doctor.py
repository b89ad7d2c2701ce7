"""``bf16-convert doctor``: what is installed, what can be converted with it, and how to install the rest."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import click

from bf16kit.converter.commands import debug_option, echo, json_option
from bf16kit.messages import errors

_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # as /proc/cpuinfo spells them

# The packages that a conversion may need, each with the extra of bf16kit that installs it.
_EXTRAS = {
    "onnxruntime": "cpu",
    **dict.fromkeys(("onnxscript", "jinja2", "matplotlib", "torch"), "convert"),
    "transformers": "hf",
    "lightning": "lightning",
    **dict.fromkeys(("tensorstore", "msgpack"), "jax"),
}
_ONNX = ("onnxruntime", "onnxscript")
_TORCH = (*_ONNX, "torch")
_HF = (*_TORCH, "transformers")
# What can be done with the parts: each source, written format and other ability with those that it needs.
_NEEDS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "sources": {
        "ONNX": _ONNX,
        "Hugging Face directory": _HF,
        **dict.fromkeys(("safetensors", "torch state dict", "TorchScript"), _TORCH),
        **dict.fromkeys(("torch.export program (.pt2)", "Lightning checkpoint"), _TORCH),
        "Orbax (JAX) checkpoint": (*_TORCH, "tensorstore"),
        "Flax msgpack": (*_TORCH, "msgpack"),
        **dict.fromkeys(("TensorFlow SavedModel", "Keras model (.keras)"), (*_ONNX, "TensorFlow")),
    },
    "formats": {"onnx": _ONNX, "torchscript": _TORCH, "pt2": _TORCH, "safetensors": _ONNX, "hf": _HF},
    "others": {
        "the report (all but --no-report)": ("jinja2", "matplotlib"),
        "bf16-convert recover": _TORCH,
        "a LightningModule as --model": (*_TORCH, "lightning"),
    },
}
_TITLES = {
    "sources": ("Sources that can be converted now", "source"),
    "formats": ("Formats that can be written now", "format"),
    "others": ("Other things that can be done now", "what"),
}
Part = tuple[str, str]  # a description of what was found, "" if it is missing; and how to get it


@click.command()
@json_option
@debug_option
def doctor(as_json: bool, debug: bool) -> None:
    """Show what is installed, what can be converted now, and the commands that install what is missing."""
    from bf16kit.messages.wording import dumps

    found = record()
    echo(dumps(found) if as_json else _describe(found))


def record() -> dict[str, Any]:
    """Return everything as docs/json.md describes it. Nothing large is imported."""
    from bf16kit import __version__

    parts: dict[str, Part] = {
        "python": (f"{platform.python_version()}, bf16kit {__version__}", ""),
        "processor": (_processor(), ""),
        "CPU kernel": _kernel(),
        "C++ compiler": _compiler(),
        **{name: _package(name, extra) for name, extra in _EXTRAS.items()},
        "TensorFlow": _tensorflow(),
    }
    installed = [{"name": name, "found": found, "remedy": remedy} for name, (found, remedy) in parts.items()]
    abilities = {}
    for kind, needs in _NEEDS.items():
        missing = {name: [part for part in needed if not parts[part][0]] for name, needed in needs.items()}
        abilities[kind] = [{"name": name, "possible": not some, "missing": some} for name, some in missing.items()]
    return {"version": 1, "installed": installed, **abilities}


def _describe(found: Mapping[str, Any]) -> str:
    """Return tables of what is installed, read and written, and the commands that install what is missing."""
    from bf16kit.messages.wording import table

    rows = [(part["name"], part["found"] or "missing") for part in found["installed"]]
    sections = [table("Installed", ("part", "found"), rows)]
    for kind, (title, column) in _TITLES.items():
        rows = [(e["name"], "yes" if e["possible"] else f"no: needs {', '.join(e['missing'])}") for e in found[kind]]
        sections.append(table(title, (column, "now"), rows))
    missing = [part for part in found["installed"] if not part["found"]]
    remedies = [f"  {part['name']}:\n{indent(part['remedy'], '    ')}" for part in missing]
    title = "To install the missing parts in this environment (pip finds bf16kit in it, and asks no index for it)"
    sections.append("\n".join([title, *remedies]) if missing else "Nothing is missing.")
    return "\n\n".join(sections)


def _package(name: str, extra: str) -> Part:
    from bf16kit.converter.process import program

    found = program.version_of(name) or (program.onnxruntime() if name == "onnxruntime" else None)
    return (found, "") if found else ("", f"pip install 'bf16kit[{extra}]'")


def _processor() -> str:
    """Return the instruction sets of this CPU that matter for speed."""
    try:
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        known = ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)", known, re.MULTILINE)
    found = set(flags[1].split()) if flags else set()
    own = ", ".join(flag for flag in _INSTRUCTIONS if flag in found) or "none of " + ", ".join(_INSTRUCTIONS)
    return f"{platform.machine()} with {own}"


def _kernel() -> Part:
    from bf16kit.runtime.ort import kernel

    try:
        found, rounding = kernel.configured_kernel(), kernel.configured_kernel(rounds=True)
    except errors.ConfigError as error:
        return "", str(error)
    if not found.path:
        return "", f"{found.note}: {found.advice}"
    return f"{found.path}, bf16 products {'emulated' if rounding.path == found.path else f'by {rounding.path}'}", ""


def _compiler() -> Part:
    command = os.environ.get("CXX", "") or "g++"
    found = next((path for path in map(shutil.which, (command, "c++", "clang++")) if path), "")
    return found, "" if found else "apt-get install g++ (on Debian), then install bf16kit again"


def _tensorflow() -> Part:
    from bf16kit.converter.read import tensorflow

    try:
        found = tensorflow.find()
    except errors.UsageError as error:
        return "", str(error)
    if found.missing:
        return "", "\n".join(tensorflow.PREPARE)
    versions = ", ".join(f"{package} {found.versions[package]}" for package in ("tensorflow", "tf2onnx"))
    return f"{versions} in {found.python}", ""
