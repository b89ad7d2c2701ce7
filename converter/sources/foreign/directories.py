"""Recognises foreign directories by the files that their writers always create, and by config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONFIG_LIMIT = 16 << 20  # bytes; real models' have some kilobytes
_NAME_LIMIT = 80  # characters of a quoted name in a message

Found = tuple[str, str]  # the name in the table, and a text to append to its description


def of_directory(path: Path) -> Found | None:
    """Return the foreign format of the directory ``path``, with details that the table does not have; or None."""
    config = _json(path / "config.json")
    for name, is_one in _MARKS if config else (*_MARKS, *_WEAK_MARKS):
        if is_one(path):
            return name, ""
    adapter = _json(path / "adapter_config.json")
    if adapter and not config:
        base = _named(adapter.get("base_model_name_or_path"))
        return "adapter", f" ({base})" if base else ""
    how = _quantised(path, config)
    return ("quantised", f" ({how})") if how else None


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda path: all((path / name).exists() for name in names)


def _holds(pattern: str) -> Callable[[Path], bool]:
    return lambda path: next(path.glob(pattern), None) is not None


def _is_checkpoint(path: Path) -> bool:
    """Return whether the directory has TensorFlow variables without the graph that a SavedModel has."""
    return _holds("*.data-00000-of-*")(path) and _holds("*.index")(path)


_MARKS: tuple[tuple[str, Callable[[Path], bool]], ...] = (
    ("coreml package", _has("Manifest.json", "Data/com.apple.CoreML")),
    ("coreml compiled", _has("coremldata.bin")),
    ("diffusers", _has("model_index.json")),
    ("trtllm", _has("rank0.engine")),
)
# These may also be beside a complete Hugging Face model, where a trainer left them.
_WEAK_MARKS: tuple[tuple[str, Callable[[Path], bool]], ...] = (
    ("lightning shards", _has("meta.pt", ".metadata")),
    ("distributed", _holds("*.distcp")),
    ("deepspeed", _has("zero_to_fp32.py")),
    ("paddle", _holds("*.pdiparams")),
    ("paddle", _holds("*.pdparams")),
    ("tensorflow checkpoint", _is_checkpoint),
    ("mlflow", _has("MLmodel")),
)


def _quantised(path: Path, config: dict[str, Any]) -> str:
    """Describe how the weights of a Hugging Face directory are quantised; "" when they are not."""
    said = config.get("quantization_config")
    for name in ("quantize_config.json", "quant_config.json"):  # written by the first tools of GPTQ and AWQ
        said = said or _json(path / name)
    said = said or (config.get("quantization") if isinstance(config.get("quantization"), dict) else None)  # MLX
    if not isinstance(said, dict) or not said:
        return ""
    method = _named(said.get("quant_method")) or _named(said.get("quant_type")) or "quantization_config in config.json"
    bits = said.get("bits", said.get("w_bit"))
    return f"{method}, {bits} bits" if isinstance(bits, int) else method


def _named(value: object) -> str:
    return value[:_NAME_LIMIT] if isinstance(value, str) else ""


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of ordinary size; {} for anything else, which the reader reports better."""
    try:
        if not path.is_file() or path.stat().st_size > _CONFIG_LIMIT:
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
