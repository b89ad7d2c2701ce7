"""Tensors of torch's own files, ``.pt`` state dicts and Lightning checkpoints, without running their pickles."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bf16kit.errors import SourceError
from converter.model import Array
from converter.process.quiet import first_line, quiet
from converter.sources import torch_records
from converter.sources.detect import Kind

if TYPE_CHECKING:
    import torch

_FORBIDDEN = re.compile(r"GLOBAL (\S+)")
_NESTED = ("state_dict", "model_state_dict", "model")  # Lightning's key, and the two names training scripts use


def read_file(path: Path, kind: Kind, *, trust_pickle: bool) -> tuple[dict[str, Array], torch.nn.Module | None]:
    """The tensors of ``path`` by name, memory-mapped, and the module itself when a whole one was saved.

    Pickles run code when they are loaded. So torch's zip files are loaded with ``weights_only``, which builds nothing
    but tensors and plain containers, and bare pickles not at all, unless ``trust_pickle``.
    """
    if kind is Kind.PICKLE and not trust_pickle:
        raise SourceError(
            f"{path}: is a bare pickle (torch before 1.6, or not torch at all), and loading it could run any code;"
            " save it again as safetensors, or pass --trust-pickle if you trust whoever made it"
        )
    if kind is Kind.TORCH_ZIP and not trust_pickle:
        torch_records.check_stored(path)
        torch_records.check_names(path)
    loaded = _load(path, mapped=kind is Kind.TORCH_ZIP, trust_pickle=trust_pickle)
    import torch

    if isinstance(loaded, torch.nn.Module):
        return _to_numpy(path, loaded.state_dict()), loaded
    state = _state_dict(path, loaded)
    if kind is Kind.TORCH_ZIP and not trust_pickle:  # what a trusted pickle builds need not lie in the file
        torch_records.check(path, _storages(state))
    return _to_numpy(path, state), None


def _storages(state: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Address and size of the memory behind every tensor of ``state`` that has any."""
    import torch

    dense = (t for t in state.values() if isinstance(t, torch.Tensor) and t.layout is torch.strided)
    storages = (tensor.untyped_storage() for tensor in dense if tensor.device.type == "cpu")
    return {(storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes()}


def _load(path: Path, *, mapped: bool, trust_pickle: bool) -> Any:
    import torch

    try:
        with quiet():
            return torch.load(path, map_location="cpu", weights_only=not trust_pickle, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = _FORBIDDEN.search(str(error))
        what = f" ({found[1]})" if found else ""
        raise SourceError(
            f"{path}: holds more than tensors{what}, and loading that could run any code; save its state_dict()"
            " instead, or pass --trust-pickle if you trust whoever made it"
        ) from error
    except Exception as error:  # a trusted pickle runs code that may raise anything
        raise SourceError(f"{path}: torch cannot load it: {first_line(error)}") from error


def _state_dict(path: Path, loaded: Any) -> Mapping[str, Any]:
    if not isinstance(loaded, Mapping):
        raise SourceError(f"{path}: holds a {type(loaded).__name__}, expected a state dict")
    for key in _NESTED:
        inner = loaded.get(key)
        if isinstance(inner, Mapping) and not _has_tensors(loaded):
            return inner
    if not _has_tensors(loaded):
        keys = ", ".join(sorted(map(str, loaded))[:5]) or "nothing"
        raise SourceError(f"{path}: holds no tensors at its top level, nor under 'state_dict'; it has {keys}")
    return loaded


def _has_tensors(loaded: Mapping[Any, Any]) -> bool:
    import torch

    return any(isinstance(value, torch.Tensor) for value in loaded.values())


def _to_numpy(path: Path, state: Mapping[str, Any]) -> dict[str, Array]:
    import torch

    return {str(name): _array(path, name, t) for name, t in state.items() if isinstance(t, torch.Tensor)}


def _array(path: Path, name: str, tensor: torch.Tensor) -> Array:
    """``tensor`` as a numpy view of the same memory; bfloat16, which numpy lacks, through its 16-bit pattern."""
    import ml_dtypes
    import torch

    if tensor.device.type == "meta":
        raise SourceError(f"{path}: tensor {name!r} was saved from the meta device, without its values")
    try:
        plain = tensor.detach().contiguous()
        if plain.dtype is torch.bfloat16:
            return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        array: Array = plain.numpy()
    except (TypeError, RuntimeError, NotImplementedError):
        raise SourceError(f"{path}: tensor {name!r} has the unknown dtype {_dtype(tensor)}") from None
    if array.dtype.kind not in "biuf":
        raise SourceError(f"{path}: tensor {name!r} has the unknown dtype {_dtype(tensor)}")
    return array


def _dtype(tensor: torch.Tensor) -> str:
    layout = "" if str(tensor.layout) == "torch.strided" else f" ({tensor.layout})"
    return str(tensor.dtype).removeprefix("torch.") + layout
