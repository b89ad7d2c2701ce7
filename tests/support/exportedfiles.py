"""torch.export archives as torch writes them, and the same with something changed in their records."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

Records = dict[str, bytes]
MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


def exported(module: torch.nn.Module, *example: Any, batch: bool = True, **named: Any) -> bytes:
    """``module``, in evaluation mode, as torch saves it; ``batch``: the first dimension of every tensor is free."""
    axes = {0: torch.export.Dim.DYNAMIC} if batch else None
    shapes = tuple(axes for _ in example)
    program = torch.export.export(module.eval(), example, named or None, dynamic_shapes=shapes if not named else None)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of tensors that do not fill their memory
        torch.export.save(program, buffer)
    return buffer.getvalue()


def records(archive: bytes) -> Records:
    """An archive's records, without the folder that holds them."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def packed(found: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of these records."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in found.items():
            file.writestr(zipfile.ZipInfo(f"m/{name}"), content, compression)
    return buffer.getvalue()


def with_records(archive: bytes, **changed: bytes | None) -> bytes:
    """``archive`` with records replaced, added, or, where None is given, left out; ``__`` stands for a slash."""
    found = records(archive)
    for name, content in changed.items():
        found.pop(name, None)
        if content is not None:
            found[name] = content
    return packed(found)


def changed(archive: bytes, record: str, edit: Callable[[Any], object]) -> bytes:
    """``archive`` after ``edit`` of the JSON in one of its records, which it changes in place."""
    found = records(archive)
    value = json.loads(found[record])
    edit(value)
    found[record] = json.dumps(value).encode()
    return packed(found)


def node(program: Any, place: int = 0) -> Any:
    """A node of a program's JSON."""
    return program["graph_module"]["graph"]["nodes"][place]
