"""Reads the tensors of torch's own files, state dicts and training checkpoints, without running their pickles.

torch maps a zip file and takes as many bytes from each record as the pickle asks for. It does not check the record's
size, so a false claim would read other records' bytes without an error. Here it is checked.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bf16kit.converter.process.quiet import first_line, quiet
from bf16kit.converter.read.detect import NO_ARCHIVE, Kind
from bf16kit.converter.read.sources import check_claim, untrusted
from bf16kit.converter.source import Array
from bf16kit.messages.errors import SourceError
from bf16kit.messages.wording import first_few
from bf16kit.runtime.torchruntimes import to_array

_ZIPS = (Kind.TORCH_ZIP, Kind.LIGHTNING)
_LIGHTNING_REMEDY = (
    "the cause is usually a hyper-parameter: train with save_hyperparameters(ignore=[...]) for values that are not"
    " numbers or text"
)


def read_file(path: Path, kind: Kind, *, trust_code: bool) -> tuple[dict[str, Array], torch.nn.Module | None]:
    """Return the tensors of ``path`` by name, memory-mapped, and the module itself when a whole one was saved.

    Without ``trust_code`` zip files are loaded with ``weights_only``, which runs no code, and bare pickles not at all.
    """
    loaded = load(path, kind, trust_code=trust_code)
    if isinstance(loaded, torch.nn.Module):
        return to_numpy(path, loaded.state_dict()), loaded
    return arrays(path, kind, _state_dict(path, loaded), trust_code=trust_code), None


def load(path: Path, kind: Kind, *, trust_code: bool) -> Any:
    """Return the contents of ``path``, tensors mapped; :class:`SourceError` for what :func:`read_file` rejects."""
    if kind is Kind.PICKLE and not trust_code:
        raise untrusted(path, "is a bare pickle (torch before 1.6, or not torch at all)", "save it as safetensors")
    try:
        with quiet():
            return torch.load(path, map_location="cpu", weights_only=not trust_code, mmap=kind in _ZIPS)
    except pickle.UnpicklingError as error:
        remedy = _LIGHTNING_REMEDY if kind is Kind.LIGHTNING else "save its state_dict() instead"
        raise untrusted(path, f"holds more than tensors{_unsafe_globals(path)}", remedy) from error
    except Exception as error:  # a trusted pickle runs code that may raise anything
        raise SourceError(f"{path}: torch cannot load it: {first_line(error)}") from error


def _unsafe_globals(path: Path) -> str:
    """Name the classes and functions that a checkpoint's pickle asks for beside tensors; "" if it cannot be read."""
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # noqa: BLE001 - a damaged pickle raises nearly anything; then torch's first error is reported
        return ""
    return f" ({first_few(names)})" if names else ""


def _state_dict(path: Path, loaded: Any) -> Mapping[str, Any]:
    if not isinstance(loaded, Mapping):
        raise SourceError(f"{path}: holds a {type(loaded).__name__}, expected a state dict")
    if any(isinstance(value, torch.Tensor) for value in loaded.values()):
        return loaded
    for key in ("state_dict", "model_state_dict", "model"):  # as training scripts call it
        if isinstance(nested := loaded.get(key), Mapping):
            return nested
    keys = ", ".join(sorted(map(str, loaded))[:5]) or "nothing"
    raise SourceError(f"{path}: holds no tensors at its top level, nor under 'state_dict'; it has {keys}")


def arrays(path: Path, kind: Kind, state: Mapping[Any, Any], *, trust_code: bool) -> dict[str, Array]:
    """Return the tensors of ``state``, which was loaded from ``path``, as numpy views of the mapped file."""
    if kind in _ZIPS and not trust_code:  # a trusted pickle may create tensors that are not in the file
        _check_records(path, state)
    return to_numpy(path, state)


def to_numpy(path: Path, state: Mapping[Any, Any]) -> dict[str, Array]:
    """Return the tensors of ``state`` as numpy views; those that are not contiguous are copied.

    Raises :class:`SourceError` for a dtype that numpy does not have, and for copies much larger than the file.
    """
    tensors = {str(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    dense = [tensor for tensor in tensors.values() if tensor.layout is torch.strided]
    check_claim(path, sum(tensor.nbytes for tensor in dense if not tensor.is_contiguous()), [path])
    return {name: _array(path, name, tensor) for name, tensor in tensors.items()}


def _array(path: Path, name: str, tensor: torch.Tensor) -> Array:
    """Return ``tensor`` as a numpy view of the same memory; bfloat16, which numpy lacks, through its 16-bit pattern."""
    if tensor.device.type == "meta":
        raise SourceError(f"{path}: tensor {name!r} was saved from the meta device, without its values")
    try:
        array = to_array(tensor.detach().contiguous())
        if array.dtype.kind in "biufV":  # V: bfloat16
            return array
    except (TypeError, RuntimeError):
        pass
    if tensor.layout is not torch.strided:
        raise SourceError(f"{path}: tensor {name!r} is sparse ({tensor.layout}); make it dense: tensor.to_dense()")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_complex():
        remedy = "keep torch.view_as_real of it in the module, and take torch.view_as_complex of that in forward"
        raise SourceError(f"{path}: tensor {name!r} is complex ({dtype}); {remedy}")
    raise SourceError(f"{path}: tensor {name!r} has the unknown dtype {dtype}")


def check_bytes(path: Path) -> None:
    """Raise :class:`SourceError` if the archive is truncated, or a record's bytes are not those that were written."""
    try:
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
    except (*NO_ARCHIVE, zlib.error) as error:
        raise SourceError(f"{path}: is a truncated or damaged zip archive ({error})") from None
    if changed is not None:
        raise SourceError(f"{path}: damaged: its record {changed!r} has other bytes than were written")


def _check_records(path: Path, state: Mapping[Any, Any]) -> None:
    """Raise :class:`SourceError` unless each tensor's memory has a record's size, and its distance from the others."""
    dense = (t for t in state.values() if isinstance(t, torch.Tensor) and t.layout is torch.strided)
    memory = (tensor.untyped_storage() for tensor in dense if tensor.device.type == "cpu")
    storages = {(storage.data_ptr(), storage.nbytes()) for storage in memory if storage.nbytes()}
    if not storages:
        return
    reader: Any = torch._C.PyTorchFileReader(str(path))
    with zipfile.ZipFile(path) as archive:  # the reader of torch before 2.13 tells no sizes
        sizes = {each.filename.partition("/")[2]: each.file_size for each in archive.infolist()}
    records = {(reader.get_record_offset(name), sizes.get(name)) for name in reader.get_all_records()}
    first, size = min(storages)
    for offset, nbytes in records:
        if nbytes == size and {(address - first + offset, length) for address, length in storages} <= records:
            return
    raise SourceError(f"{path}: damaged: its tensors claim other sizes than the records that hold them")
