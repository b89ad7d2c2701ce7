"""A source's own outputs, as oracles: from the torch module as loaded, or the ONNX file as it is on disk.

They involve no step of the conversion, so they show what reading, exporting and cleaning up did to a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from bf16kit.converter.process.quiet import first_line, quiet
from bf16kit.converter.source import FP32_ROUNDOFF, Feeds, Oracle, TorchModel
from bf16kit.messages.errors import ConversionError, RuntimeFailure
from bf16kit.numerics.tensors import BY_NAME

if TYPE_CHECKING:
    import torch

# Operators that move or convert data but do not compute: what they read in half precision is widened or moved exactly.
_EXACT = frozenset({"Cast", "CastLike", "Constant", "Identity", "Reshape", "Transpose"})
_ROUNDOFF = {"FLOAT16": 2.0**-11, "BFLOAT16": 2.0**-8}
_HALVES = {10: "FLOAT16", 16: "BFLOAT16"}  # by the numbers of TensorProto.DataType


def of_module(model: TorchModel) -> Oracle:
    """Return the oracle of ``model``'s module, on the CPU, without gradients, with matrix products in full fp32.

    The module must not have changed since it was loaded: see :func:`unchanged`.
    """

    def outputs(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        import torch

        precision = torch.get_float32_matmul_precision()  # the user's code may have allowed TF32 or bf16 in products
        torch.set_float32_matmul_precision("highest")
        try:
            for feed in feeds:
                yield _run(model, feed)
        finally:
            torch.set_float32_matmul_precision(precision)

    return Oracle(outputs, "the torch module in evaluation mode, fp32, on the CPU")


def _run(model: TorchModel, feed: Feeds) -> Feeds:
    import torch

    from bf16kit.converter.read.statedict import to_torch

    try:
        with quiet(), torch.no_grad():
            # copies: torch has no read-only tensors, and a module may modify its inputs
            outputs = model.module(*(to_torch(np.array(feed[spec.name], order="C")) for spec in model.inputs))
        widened = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor for tensor in outputs)
        plain = [tensor.detach().cpu().contiguous().numpy() for tensor in widened]
    except Exception as error:  # the user's model may raise anything
        raise RuntimeFailure(f"the torch module failed on it: {first_line(error)}") from error
    if len(plain) != len(model.outputs):
        raise ConversionError(
            f"the module returns {len(plain)} tensors for one input and {len(model.outputs)} for another; let forward"
            " return the same number for all sizes"
        )
    return dict(zip(model.outputs, plain, strict=True))


@contextmanager
def unchanged(module: torch.nn.Module, what: str) -> Iterator[None]:
    """Raise :class:`ConversionError` naming the first tensor of ``module`` that ``what``, the block, changes.

    torch counts the changes of each tensor, and a replaced tensor has another address, so nothing is copied or hashed.
    """
    before = _tensor_versions(module)
    yield
    for name, _ in sorted(before ^ _tensor_versions(module)):
        raise ConversionError(
            f"{what} changed the model's own tensor {name!r}, so its outputs are no longer those of the"
            " checkpoint; make the model's forward leave its parameters and buffers unchanged"
        )


def _tensor_versions(module: torch.nn.Module) -> set[tuple[str, tuple[int, int, bool]]]:
    return {
        (name, (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, module.training))
        for name, tensor in module.state_dict(keep_vars=True).items()
        if hasattr(tensor, "data_ptr")  # what a module adds itself may be no tensor
    }


def of_onnx(path: Path, model: ir.Model) -> Oracle:
    """Return the oracle of the file at ``path`` in ONNX Runtime without optimisations; ``model`` is the parsed file."""

    def outputs(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        from bf16kit.runtime.ort.session import open_session

        session = open_session(path, optimise=False)
        for feed in feeds:
            yield _run_onnx(session, feed)

    return Oracle(outputs, "the untouched ONNX file in ONNX Runtime, no optimisation", roundoff(model))


def _run_onnx(session: Any, feed: Feeds) -> Feeds:
    """Return the outputs for ``feed``, whose arrays are converted to the file's dtypes."""
    from bf16kit.runtime.ort.session import as_runtime_failure, run_with_values

    inputs, outputs = session.get_inputs(), session.get_outputs()
    names = [edge.name for edge in outputs]
    given = {edge.name: np.asarray(feed[edge.name].astype(_dtype(edge.type), copy=False), order="C") for edge in inputs}
    half = any(edge.type == "tensor(bfloat16)" for edge in (*inputs, *outputs))
    with as_runtime_failure("ONNX Runtime failed on it"):
        values = run_with_values(session, names, given) if half else session.run(names, given)
    return dict(zip(names, values, strict=True))


def _dtype(text: str) -> np.dtype[Any]:
    """Return numpy's dtype for ONNX Runtime's ``tensor(float16)``."""
    name = text.removeprefix("tensor(").removesuffix(")")
    return BY_NAME[{"float": "float32", "double": "float64"}.get(name, name)].numpy


def roundoff(model: ir.Model) -> float:
    """Return the unit roundoff of the least precise type among the inputs of operators that compute."""
    nodes = [node for node in model.graph.all_nodes() if node.op_type not in _EXACT]
    types = {_declared_type(value) for node in nodes for value in node.inputs if value is not None}
    return max(_ROUNDOFF.get(name, FP32_ROUNDOFF) for name in types | {""})


def _declared_type(value: ir.Value) -> str:
    """Return the type of an operator's input if the file states it: of a weight, an input, or a Cast's result."""
    known, producer = value.dtype, value.producer()
    if known is None and value.const_value is not None:
        known = value.const_value.dtype
    if known is None and producer is not None and (producer.op_type, producer.domain) == ("Cast", ""):
        to = producer.attributes.get("to")
        return "" if to is None else _HALVES.get(to.as_int(), "")
    return "" if known is None else known.name
