"""Builds the graphs of an artifact in memory and writes them without weights, which are external data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import CheckerPass

from bf16kit.artifact.manifest import RESIDUAL, PlanEntry
from bf16kit.messages.errors import ConversionError
from bf16kit.messages.wording import brief
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.runtime.ort.kernel import DOMAIN as KERNEL
from bf16kit.runtime.ort.onnxgraph import REBUILT
from converter.fuse.functions import rounds_activations
from converter.fuse.fuse import Unpanel, fuse
from converter.graph.dimensions import drop_guesses
from converter.graph.initializers import dims, stays_inline
from converter.graph.operators import SHAPE_ONLY, bf16_form, label
from converter.graph.types import InferTypes
from converter.plan import Planned, narrowed
from converter.plan.profiles import PROFILES, Profile
from converter.rewrite import Prepared, run
from converter.rewrite.explicit import DropUnused
from converter.write.insertcasts import BFLOAT16, FLOAT, Narrow
from converter.write.weights import BF16_FILE, FP32_FILE, StoredWeights

REFERENCE = "reference"
_ALIGNED = (BF16_FILE, FP32_FILE, RESIDUAL)  # files with aligned tensors, which a graph may read in place


def write_graphs(
    prepared: Prepared,
    planned: Planned,
    stored: StoredWeights,
    directory: Path,
    *,
    profiles: Iterable[str] = tuple(PROFILES),
    reference: bool = True,
) -> dict[str, str]:
    """Write one ``PROFILE.onnx`` per profile into ``directory``, beside the files of weights, and reference.onnx.

    Returns the file names by profile; with ``reference``, also that of ``"reference"``. Raises
    :class:`ConversionError` if ONNX's checker rejects a graph, or if it does not follow the plan.
    """
    files = {}
    for profile in (PROFILES[name] for name in profiles):
        files[profile.name] = graph_file(profile.name)
        model = build(prepared, planned, profile)
        _write_with_panels(model, stored, directory / files[profile.name])
        _check(directory / files[profile.name], profile.base(prepared))
        _check_plan(directory / files[profile.name], planned.plan.nodes[profile.name])
    if reference:
        files[REFERENCE] = f"{REFERENCE}.onnx"
        _write(
            prepared.reference.clone(), directory / files[REFERENCE], lambda name, shape: _rebuilt(stored, name, shape)
        )
    return files


def graph_file(profile: str) -> str:
    """Return the file name of the graph of ``profile``."""
    return f"{profile}.onnx"


def write_unfused_and_fused(
    prepared: Prepared, planned: Planned, stored: StoredWeights, profile: Profile, directory: Path
) -> tuple[Path, Path]:
    """Write two graphs of ``profile`` that compute in fp32 throughout, to be compared: without fusions, and with them.

    Both read the rounded weights in ``directory``, and lie there until the caller deletes them.
    """
    exact = replace(planned, plan=planned.plan.model_copy(update={"nodes": {profile.name: []}}))
    paths = directory / "unfused.onnx", directory / "fused.onnx"
    for path, uses_kernel in zip(paths, (False, True), strict=True):
        model = build(prepared, exact, replace(profile, uses_kernel=uses_kernel))
        _write_with_panels(model, stored, path)
    return paths


def build(prepared: Prepared, planned: Planned, profile: Profile) -> ir.Model:
    """Build the graph of ``profile`` in memory, as ``planned``; ``prepared`` does not change.

    Initializers that the plan narrows have the type bf16 but still hold fp32 data: the caller that writes or runs the
    graph provides the bf16 data. Raises :class:`ConversionError` that names the failed step.
    """
    narrow = narrowed(planned.plan.tensors)
    nodes = {entry.name for entry in planned.plan.nodes[profile.name] if entry.precision == "bf16"}
    base, fusions = profile.base(prepared), planned.fusions
    if profile.uses_kernel:
        rounding = nodes if profile.rounds_products else frozenset()
        model, _ = fuse(base, narrow, fusions.panels, rounding=rounding, refused=fusions.refused)
    else:
        model = base.clone()
    return run([Narrow(narrow, nodes), DropUnused(), InferTypes()], model)


def _write_with_panels(model: ir.Model, stored: StoredWeights, path: Path) -> None:
    """Write the graph from :func:`build`, reading panels as stored."""
    unpanel = Unpanel(stored.tensors)
    run([unpanel], model)
    _write(model, path, lambda name, shape: _stored(stored, stored.aliases.get(name, name), shape), unpanel.declared)


def _stored(stored: StoredWeights, name: str, shape: ir.Shape) -> ir.ExternalTensor:
    """Return a tensor as its file holds it, in the shape that its graph reads; panels are one row of elements."""
    entry = stored.tensors[name]
    return ir.ExternalTensor(
        entry.file, entry.offset, entry.bytes, ir.DataType(BY_NAME[entry.dtype].onnx), shape=shape, name=name
    )


def _rebuilt(stored: StoredWeights, name: str, shape: ir.Shape) -> ir.ExternalTensor:
    """Return the reference's tensor, read from its file if possible, else rebuilt at load.

    A rounded tensor, or one in an export's file, which is not aligned, is rebuilt in a file outside the artifact.
    """
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
    """Write ``model`` with its large tensors as ``external`` gives them, and those in ``declared`` as they are.

    Inline tensors are copied: the graphs share the original, and it can have only one name.
    """
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or name in declared:
            continue
        if not stays_inline(tensor):
            value.const_value = external(name, ir.Shape(value.shape or dims(tensor)))
            value.const_value.name = name
        elif isinstance(tensor, ir.StringTensor):
            value.const_value = ir.StringTensor(tensor.raw, shape=ir.Shape(dims(tensor)), name=name)
        else:
            value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
    path.write_bytes(serialize(model))


def serialize(model: ir.Model) -> bytes:
    """Return the bytes of a graph; the same graph gives the same bytes."""
    proto = ir.to_proto(model)
    drop_guesses(proto)
    return proto.SerializeToString(deterministic=True)


def _check(path: Path, source: ir.Model) -> None:
    """Pass ``path`` through ONNX's checker; with strict type inference if the source itself passes that."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except onnx.checker.ValidationError as error:
        raise ConversionError(f"{path.name}: ONNX's checker rejects the graph: {brief(error)}") from error
    except onnx.shape_inference.InferenceError as error:
        try:
            CheckerPass(full_check=True)(source.clone())
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            return
        raise ConversionError(f"{path.name}: types do not match: {brief(error)}") from error


def _check_plan(path: Path, planned: Sequence[PlanEntry]) -> None:
    """Compare the graph at ``path`` with its profile's part of the plan.

    Raises :class:`ConversionError` that names the first node which rounds to bf16 where the plan does not, or computes
    in fp32 where the plan says bf16.
    """
    model = ir.load(path)
    precision = {entry.name: entry.precision for entry in planned}
    found = (_fault(node, precision, model.opset_imports[""]) for node in model.graph)
    fault = next((each for each in found if each is not None), None)
    if fault is not None:
        raise ConversionError(
            f"{path.name}: {fault}; the graph does not follow the plan, and nothing was published. This is a bug in"
            " bf16-convert; please report it"
        )


def _fault(node: ir.Node, precision: Mapping[str, str], opset: int) -> str | None:
    """Return how ``node`` computes otherwise than planned.

    A product of the CPU kernel must round its activations if planned in bf16; an attention node has the name of its
    product with the values. A node that is not planned may be a cast that was inserted.
    """
    planned = precision.get(node.name or "")
    if node.domain == KERNEL:
        is_product = node.op_type.startswith(("MatMul", "Attention"))
        if is_product and rounds_activations(node.op_type) != (planned == "bf16"):
            what = "round its activations" if planned == "bf16" else "not round its activations"
            return f"product {node.name!r} should {what}, and is {label(node)}"
    elif planned is None and node.op_type == "Cast" and node.attributes["to"].as_int() == int(BFLOAT16):
        for reader in (use.node for use in node.outputs[0].uses() if use.node.op_type not in SHAPE_ONLY):
            if precision.get(reader.name or "") != "bf16" and reader.domain != KERNEL:
                return f"cast {node.name!r} rounds to bf16 for {reader.name!r}, which computes in fp32"
    elif planned == "bf16":
        form = bf16_form(node, opset)
        if form is None:
            return f"node {node.name!r} is to compute in bf16, which {label(node)} cannot"
        values = [("input", node.inputs[index]) for index in form.inputs]
        for what, value in (*values, *(("result", node.outputs[index]) for index in form.outputs)):
            if value is not None and value.dtype == FLOAT:
                return f"node {node.name!r} is to compute in bf16, and its {what} {value.name!r} is fp32"
    return None
