"""torch.export archives as torch writes them, and copies with changed records."""

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


def exported(module: torch.nn.Module, *example: Any, batch: bool = True, **named: Any) -> bytes:
    """Export ``module`` in evaluation mode and return the archive that torch saves.

    With ``batch``, the first dimension of every tensor in ``example`` is free; with ``named`` inputs, none is.
    """
    axes = {0: torch.export.Dim.DYNAMIC} if batch else None
    shapes = tuple(axes for _ in example)
    program = torch.export.export(module.eval(), example, named or None, dynamic_shapes=shapes if not named else None)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about tensors that do not fill their storage
        torch.export.save(program, buffer)
    return buffer.getvalue()


def records(archive: bytes) -> Records:
    """Return an archive's records by name, without the folder that contains them."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def packed(found: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in found.items():
            file.writestr(zipfile.ZipInfo(f"m/{name}"), content, compression)
    return buffer.getvalue()


def changed(archive: bytes, record: str, edit: Callable[[Any], object]) -> bytes:
    """Return ``archive`` with one record of JSON changed by ``edit``, which changes the parsed value in place."""
    found = records(archive)
    value = json.loads(found[record])
    edit(value)
    found[record] = json.dumps(value).encode()
    return packed(found)


def node(program: Any, place: int = 0) -> Any:
    return program["graph_module"]["graph"]["nodes"][place]
