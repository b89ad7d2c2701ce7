"""JSON: figures for programs, with the same names as in the code, and a repository's files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bf16kit.messages.errors import Bf16kitError


def plain(value: Any) -> Any:
    """Return ``value`` in JSON's own types.

    Floats that are not finite become the strings ``"inf"``, ``"-inf"``, ``"nan"``.
    """
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="json"))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def dumps(value: Any) -> str:
    """Return ``value`` as JSON text: keys sorted, indented by one space.

    The text is ASCII, so that a terminal does not execute control characters in a name.
    """
    return json.dumps(plain(value), sort_keys=True, indent=1, allow_nan=False)


def parse_json(data: bytes, error: type[Bf16kitError], where: object) -> Any:
    """Return the value in ``data``, in UTF-8; raise ``error``, which begins with ``where``, if it is not JSON.

    The caller bounds the bytes.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise error(f"{where}: not JSON") from None
