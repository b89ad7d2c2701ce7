"""Simplifies the graph that torch's exporter writes, without computing on weights, and puts the checkpoint's in.

The exporter's own optimiser would also fold BatchNorm into weights. Here the conversion does that, because it must keep
the scale for ``restore``. So only rules that move or drop data are applied.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import onnx_ir as ir

from bf16kit.converter.graph.equality import OTHER_FLOATS, Fingerprint, fingerprint, in_fp32, same_bits
from bf16kit.converter.graph.initializers import ComputedTensor, rows_of
from bf16kit.converter.graph.names import FreshNames, all_value_names
from bf16kit.converter.source import Array

_RULES = """
    add_0 cast_cast cast_constant_of_shape cast_constant_of_shape_without_value collapse_slice2 collapse_slice div_by_1
    dropout_inference dropout_zero materialize_reshape_shape mul_by_1 no_op_cast no_op_dynamic_scatter_nd no_op_expand
    no_op_static_scatter_nd no_op_transpose one_reshape_matmul_reshape reshape_reshape squeeze_reshape_1d sub_0
    transpose_transpose two_reshapes_matmul_reshape unsqueeze_unsqueeze
""".split()  # noqa: SIM905 - words are read more easily than a list of quoted ones
_SMALL = 1024  # bytes of constants that may be folded into any mask or table, and of tensors copied without a lookup
_ROUNDS = 2  # folding a constant enables a rule, and a rule enables folding


def simplify(model: ir.Model) -> None:
    """Fold shape arithmetic and transposes of weights, and drop operators without effect; in place.

    Nothing is folded into a larger tensor of floats, such as a table of positions: the artifact would hold it beside
    the checkpoint's own tensors from which it is computed, and ONNX Runtime computes it once, when it loads the graph.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter.rules import common as rules

    # Copies: a rule keeps the last graph it saw, and the library's own rules live as long as the library.
    applied = copy.deepcopy([getattr(rules, f"{name}_rule") for name in _RULES])
    common.InlinePass()(model)
    for _ in range(_ROUNDS):
        # Its evaluator raises at some operators (SplitToSequence along a free dimension); what it folded before stays.
        with suppress(RuntimeError):
            optimizer.fold_constants_ir(model, onnx_shape_inference=True, should_fold=_keep_if_it_grows)
        rewriter.rewrite(model, applied)
    common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)


def _keep_if_it_grows(node: ir.Node) -> bool | None:
    """Return False for a node whose floating-point output is larger than its inputs together; None: fold as usual."""
    output = node.outputs[0]
    if output.dtype is None or not output.dtype.is_floating_point() or not (output.shape and output.shape.is_static()):
        return None
    tensors = (ir.convenience.get_const_tensor(value) for value in node.inputs if value is not None)
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return False if _SMALL <= nbytes < math.prod(output.shape.numpy()) * output.dtype.itemsize else None


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
        renamed = target_name != value.name and not value.is_graph_output()
        if renamed and target_name not in model.graph.initializers:
            value.name = names.make(target_name)  # an input or a node's output may already have this name
        value.const_value = as_initializer(array.copy() if view is None else view, value.const_value, value.name)


def _lookup(
    array: Array, tensors: Mapping[str, Array], known: Mapping[Fingerprint, list[str]]
) -> tuple[str | None, Array | None]:
    for candidate in () if array.nbytes < _SMALL else (array, array.T) if array.ndim == 2 else (array,):
        for name in known.get(fingerprint(candidate), ()):
            if same_bits(tensors[name], candidate, as_fp32=_is_other(tensors[name])):
                return name, tensors[name] if candidate is array else tensors[name].T
    return None, None


def _is_other(tensor: Array) -> bool:
    return tensor.dtype.name in OTHER_FLOATS


def as_initializer(array: Array, like: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    """Return ``array`` in place of ``like``: fp16, bf16 and fp64 are computed in fp32 where that is fp32."""
    if not _is_other(array) or like.dtype is not ir.DataType.FLOAT:
        return ir.Tensor(array, name=name)
    computed = ComputedTensor(lambda rows: in_fp32(rows_of(array, rows)), like)
    computed.name = name
    return computed


def _own_name(name: str, tensors: Mapping[str, Array]) -> str:
    """Return a parameter's name without the prefixes of modules that wrap the checkpoint's module."""
    parts = name.removeprefix("module.").split(".")  # the prefix that `Positional` adds
    inner = (".".join(parts[start:]) for start in range(len(parts)))
    return next((own for own in inner if own in tensors), ".".join(parts))
