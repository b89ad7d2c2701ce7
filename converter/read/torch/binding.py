"""Replaces an exported graph's weights by the checkpoint's memory and names, so that the module can be freed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from converter.graph.equality import OTHER_FLOATS, Fingerprint, fingerprint, in_fp32, same_bits
from converter.graph.initializers import ComputedTensor, rows_of
from converter.graph.names import FreshNames, all_value_names
from converter.source import Array

if TYPE_CHECKING:
    import onnx_ir as ir

_SMALL = 1024  # bytes; smaller tensors are copied without a lookup
_WRAPPER = "module."  # prefix that `Positional` adds to the names of parameters


def bind(model: ir.Model, tensors: Mapping[str, Array]) -> None:
    """Make every initializer a view of the checkpoint tensor it equals, transposed or not; a copy if there is none.

    An initializer that equals an fp16, bf16 or fp64 tensor in fp32 is computed from that tensor whenever it is read.

    In place. Afterwards nothing in the graph refers to the module's parameters, which may change or be freed.
    """
    known: dict[Fingerprint, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        known[fingerprint(tensor, as_fp32=_is_other(tensor))].append(name)
    names = FreshNames(all_value_names(model))
    for value in list(model.graph.initializers.values()):
        if value.const_value is None:
            continue
        array = np.asarray(value.const_value.numpy())
        found, view = _lookup(array, tensors, known)
        target_name = found or _own_name(value.name or "", tensors)
        if target_name != value.name and target_name not in model.graph.initializers:
            value.name = names.make(target_name)  # an input or a node's output may already have this name
        value.const_value = _tensor(array.copy() if view is None else view, value.const_value, value.name)


def _lookup(
    array: Array, tensors: Mapping[str, Array], known: Mapping[Fingerprint, list[str]]
) -> tuple[str | None, Array | None]:
    if array.nbytes < _SMALL:
        return None, None
    for transposed in (False, True) if array.ndim == 2 else (False,):
        candidate = array.T if transposed else array
        for name in known.get(fingerprint(candidate), ()):
            if same_bits(tensors[name], candidate, as_fp32=_is_other(tensors[name])):
                return name, tensors[name].T if transposed else tensors[name]
    return None, None


def _is_other(tensor: Array) -> bool:
    return tensor.dtype.name in OTHER_FLOATS


def _tensor(array: Array, like: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    import onnx_ir as ir

    if not _is_other(array) or like.dtype is not ir.DataType.FLOAT:
        return ir.Tensor(array, name=name)
    computed = ComputedTensor(lambda rows: in_fp32(rows_of(array, rows)), like)
    computed.name = name
    return computed


def _own_name(name: str, tensors: Mapping[str, Array]) -> str:
    """Return a parameter's name without the prefixes of modules that wrap the checkpoint's module."""
    bare = name.removeprefix(_WRAPPER)
    inner = bare
    while inner not in tensors and "." in inner:
        inner = inner.partition(".")[2]
    return inner if inner in tensors else bare
