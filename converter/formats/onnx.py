"""The graphs of an artifact: built in memory, then written as structure only, every weight external data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import onnx
import onnx_ir as ir

from bf16kit.errors import ConversionError
from bf16kit.manifest import RESIDUAL
from bf16kit.runtime.externaldata import REBUILT
from bf16kit.tensors import BY_NAME
from bf16kit.wording import brief
from converter.cpukernel.attend import Attend
from converter.cpukernel.join import JoinProducts
from converter.cpukernel.lookup import LookUp
from converter.cpukernel.normalise import Normalise
from converter.cpukernel.unpanel import Unpanel
from converter.cpukernel.use import UseKernel
from converter.formats.narrowing import Narrow
from converter.formats.weights import BF16_FILE, FP32_FILE, StoredWeights
from converter.graph.initializers import dims, stays_inline
from converter.graph.types import InferTypes
from converter.passes import Prepared, run
from converter.passes.unused import DropUnused
from converter.plan import Planned, narrowed
from converter.plan.profiles import PROFILES, Profile

REFERENCE = "reference"
_ALIGNED = (BF16_FILE, FP32_FILE, RESIDUAL)  # files whose tensors a graph may read where they are


def write_graphs(
    prepared: Prepared,
    planned: Planned,
    stored: StoredWeights,
    directory: Path,
    *,
    profiles: Iterable[str] = tuple(PROFILES),
    reference: bool = True,
) -> dict[str, str]:
    """Write one ``PROFILE.onnx`` per profile into ``directory``, where the weights files are, and reference.onnx.

    Returns the file names by profile, with ``"reference"`` among them when asked for. Raises
    :class:`~bf16kit.errors.ConversionError` when ONNX's checker refuses a graph.
    """
    files = {}
    for profile in (PROFILES[name] for name in profiles):
        files[profile.name] = graph_file(profile.name)
        model = build(prepared, planned, profile)
        _write_profile(model, stored, directory / files[profile.name], profile.base(prepared))
    if reference:
        files[REFERENCE] = f"{REFERENCE}.onnx"
        _write(
            prepared.reference.clone(), directory / files[REFERENCE], lambda name, shape: _rebuilt(stored, name, shape)
        )
    return files


def graph_file(profile: str) -> str:
    """The name of the graph of ``profile``."""
    return f"{profile}.onnx"


def build(prepared: Prepared, planned: Planned, profile: Profile) -> ir.Model:
    """The graph of ``profile`` in memory, as it was ``planned``; ``prepared`` stays as it is.

    Initializers that the plan narrows have the type bf16 and still hold the fp32 data: whoever writes or runs the graph
    says where the bf16 data is. Raises :class:`~bf16kit.errors.ConversionError` naming the step that failed.
    """
    narrow = narrowed(planned.plan.tensors)
    nodes = {entry.name for entry in planned.plan.nodes[profile.name] if entry.precision == "bf16"}
    rounding = nodes if profile.rounds_products else frozenset()
    work = planned.work
    products = [LookUp(work), UseKernel(work, rounding), JoinProducts()]
    kernel = [Attend(work, rounding), Normalise(work), *products] if profile.uses_kernel else []
    return run([*kernel, Narrow(narrow, nodes), DropUnused(), InferTypes()], profile.base(prepared).clone())


def _write_profile(model: ir.Model, stored: StoredWeights, path: Path, source: ir.Model) -> None:
    """Write the graph that :func:`build` gave, reading panels as they lie in their file; check it against its base."""
    unpanel = Unpanel(stored.tensors)
    run([unpanel], model)
    _write(model, path, lambda name, shape: _stored(stored, stored.aliases.get(name, name), shape), unpanel.declared)
    _check(path, source)


def _stored(stored: StoredWeights, name: str, shape: ir.Shape) -> ir.ExternalTensor:
    """A tensor as it lies in its file, in the shape that its graph reads: panels are so many elements in a row."""
    entry = stored.tensors[name]
    return ir.ExternalTensor(
        entry.file, entry.offset, entry.bytes, ir.DataType(BY_NAME[entry.dtype].onnx), shape=shape, name=name
    )


def _rebuilt(stored: StoredWeights, name: str, shape: ir.Shape) -> ir.ExternalTensor:
    """The reference's tensor: a rounded one is rebuilt at load, in a file that is not among the artifact's, and so is
    one of an export, whose place is not aligned; others are read where they are stored."""
    entry = stored.tensors[name]
    if entry.residual is None and entry.file in _ALIGNED:
        return _stored(stored, name, shape)
    nbytes = entry.bytes if entry.dtype == "float32" else 2 * entry.bytes
    return ir.ExternalTensor(REBUILT, 0, nbytes, ir.DataType.FLOAT, shape=shape, name=name)


def _write(
    model: ir.Model,
    path: Path,
    external: Callable[[str, ir.Shape], ir.ExternalTensor],
    declared: Collection[str] = frozenset(),
) -> None:
    """Write ``model``, its large tensors as ``external`` says where they are, and those in ``declared`` as they are."""
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if name in declared:
            continue
        if tensor is None:
            raise ConversionError(f"initializer {name!r} has no data")
        if stays_inline(tensor):
            value.const_value = _own(tensor, name)
        else:
            value.const_value = external(name, ir.Shape(value.shape or dims(tensor)))
            value.const_value.name = name
    path.write_bytes(serialize(model))


def _own(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """An inline tensor of this graph alone: several graphs share the one it was read from, and its name is theirs."""
    if isinstance(tensor, ir.StringTensor):
        return ir.StringTensor(tensor.raw, shape=ir.Shape(dims(tensor)), name=name)
    return ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=name)


def serialize(model: ir.Model) -> bytes:
    """The bytes of a graph, the same for the same graph."""
    return ir.to_proto(model).SerializeToString(deterministic=True)


def _check(path: Path, source: ir.Model) -> None:
    """Pass ``path`` through ONNX's checker, with strict type inference where the source itself stands it."""
    try:
        onnx.checker.check_model(str(path), full_check=False)
    except onnx.checker.ValidationError as error:
        raise ConversionError(f"{path.name}: ONNX's checker refuses the graph: {brief(error)}") from error
    fault = _type_fault(onnx.load(path, load_external_data=False))
    if fault is not None and _type_fault(_skeleton(source)) is None:
        raise ConversionError(f"{path.name}: types do not fit together: {fault}")


def _type_fault(proto: onnx.ModelProto) -> str | None:
    try:
        onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        return brief(error)
    return None


def _skeleton(model: ir.Model) -> onnx.ModelProto:
    """``model`` with its large weights declared elsewhere, so that it serialises whatever its size."""
    slim = model.clone()
    for name, value in slim.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and not stays_inline(tensor):
            shape = ir.Shape(dims(tensor))
            value.const_value = ir.ExternalTensor(REBUILT, 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
    return ir.to_proto(slim)
