"""Explains why a directory is taken for one source, to a user who meant it as a directory of many."""

from __future__ import annotations

from pathlib import Path

from bf16kit.messages.errors import SourceError
from bf16kit.messages.text import listed
from converter.read import orbax
from converter.read.detect import recognise

_SHOWN = 5
# The files that identify such a directory: one of them among many checkpoints makes it a model or a foreign format.
_MARKERS = (
    *("config.json", "modules.json", "*.safetensors.index.json", "saved_model.pb", "manifest.json"),
    *("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"),
    *("Manifest.json", "coremldata.bin", "model_index.json", "rank0.engine", "meta.pt", "*.distcp", "zero_to_fp32.py"),
    *("*.pdiparams", "*.pdparams", "*.data-00000-of-*", "MLmodel", "adapter_config.json"),
    *("quantize_config.json", "quant_config.json"),
)


def explain_recognition(directory: Path) -> str:
    """Say what ``directory`` is taken for, because of which files, and what to do about it; the end of a message."""
    try:
        what = f"is taken for one source, {recognise(directory).value}"
    except SourceError as error:
        what = f"is taken for one source, and {str(error).removeprefix(f'{directory}: ')}"
    found = _markers_in(directory)
    if not found:
        return f"{directory} {what}"
    names = listed([*found[:_SHOWN], *([f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])])
    return (
        f"{directory} {what}, because it contains {names}; to convert the checkpoints beside"
        f" {'it' if len(found) == 1 else 'them'}, move {'it' if len(found) == 1 else 'them'} to another directory"
    )


def _markers_in(directory: Path) -> list[str]:
    names = {path.name for pattern in _MARKERS for path in directory.glob(pattern)}
    return sorted(names) + [f"{path.name}/" for path in orbax.trees(directory) if path.name not in names]
