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
    for name, is_one in _MARKERS if config else (*_MARKERS, *_WEAK_MARKERS):
        if is_one(path):
            return name, ""
    adapter = _json(path / "adapter_config.json")
    if adapter and not config:
        base = _shortened(adapter.get("base_model_name_or_path"))
        return "adapter", f" ({base})" if base else ""
    quantization = _quantised(path, config)
    return ("quantised", f" ({quantization})") if quantization else None


def _has_all(*names: str) -> Callable[[Path], bool]:
    return lambda path: all((path / name).exists() for name in names)


def _has_match(pattern: str) -> Callable[[Path], bool]:
    return lambda path: next(path.glob(pattern), None) is not None


def _is_checkpoint(path: Path) -> bool:
    """Return whether the directory has TensorFlow variables without the graph that a SavedModel has."""
    return _has_match("*.data-00000-of-*")(path) and _has_match("*.index")(path)


_MARKERS: tuple[tuple[str, Callable[[Path], bool]], ...] = (
    ("coreml package", _has_all("Manifest.json", "Data/com.apple.CoreML")),
    ("coreml compiled", _has_all("coremldata.bin")),
    ("diffusers", _has_all("model_index.json")),
    ("trtllm", _has_all("rank0.engine")),
)
# These may also be beside a complete Hugging Face model, where a trainer left them.
_WEAK_MARKERS: tuple[tuple[str, Callable[[Path], bool]], ...] = (
    ("lightning shards", _has_all("meta.pt", ".metadata")),
    ("distributed", _has_match("*.distcp")),
    ("deepspeed", _has_all("zero_to_fp32.py")),
    ("paddle", _has_match("*.pdiparams")),
    ("paddle", _has_match("*.pdparams")),
    ("tensorflow checkpoint", _is_checkpoint),
    ("mlflow", _has_all("MLmodel")),
)


def _quantised(path: Path, config: dict[str, Any]) -> str:
    """Describe how the weights of a Hugging Face directory are quantised; "" when they are not."""
    quantization = config.get("quantization_config")
    for name in ("quantize_config.json", "quant_config.json"):  # written by the first tools of GPTQ and AWQ
        quantization = quantization or _json(path / name)
    quantization = quantization or (
        config.get("quantization") if isinstance(config.get("quantization"), dict) else None
    )  # MLX
    if not isinstance(quantization, dict) or not quantization:
        return ""
    method = (
        _shortened(quantization.get("quant_method"))
        or _shortened(quantization.get("quant_type"))
        or "quantization_config in config.json"
    )
    bits = quantization.get("bits", quantization.get("w_bit"))
    return f"{method}, {bits} bits" if isinstance(bits, int) else method


def _shortened(value: object) -> str:
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
