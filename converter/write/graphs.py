"""Builds an artifact's graphs, with casts exactly where bf16 and fp32 meet, and writes them without their weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import ml_dtypes
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import CheckerPass

from bf16kit.artifact.manifest import RESIDUAL, PlanEntry
from bf16kit.converter.fuse.functions import rounds_activations
from bf16kit.converter.fuse.fuse import fuse, unpanel
from bf16kit.converter.graph.dimensions import drop_guesses
from bf16kit.converter.graph.initializers import const, dims, initializer, stays_inline
from bf16kit.converter.graph.names import FreshNames, all_value_names
from bf16kit.converter.graph.operators import RECURRENT, SHAPE_ONLY, Bf16Form, bf16_form, label
from bf16kit.converter.graph.types import infer_types
from bf16kit.converter.plan import Planned, narrowed
from bf16kit.converter.plan.profiles import PROFILES, Profile
from bf16kit.converter.rewrite import Prepared, run
from bf16kit.converter.rewrite.explicit import drop_unused
from bf16kit.converter.write.weights import BF16_FILE, FP32_FILE, StoredWeights
from bf16kit.messages.errors import ConversionError
from bf16kit.messages.wording import brief
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.runtime.ort.kernel import DOMAIN as KERNEL
from bf16kit.runtime.ort.onnxgraph import REBUILT

REFERENCE = "reference"
NARROWED = "/bf16"  # ends the name of a value in bf16, such as a constant that was rounded within the graph
FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
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
    files = {name: graph_file(name) for name in (*profiles, *([REFERENCE] if reference else []))}
    for profile in (PROFILES[name] for name in files if name != REFERENCE):
        path = directory / files[profile.name]
        _write_with_panels(build(prepared, planned, profile), stored, path)
        _check(path, profile.base(prepared))
        _check_plan(path, planned.plan.nodes[profile.name])
    if reference:
        path = directory / files[REFERENCE]
        _write(prepared.reference.clone(), path, lambda name, shape: _stored(stored, name, shape, as_fp32=True))
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
    tensors = narrowed(planned.plan.tensors)
    nodes = {entry.name for entry in planned.plan.nodes[profile.name] if entry.precision == "bf16"}
    base, fusions = profile.base(prepared), planned.fusions
    if profile.uses_kernel:
        rounding = nodes if profile.rounds_products else frozenset()
        model, _ = fuse(
            base,
            tensors,
            fusions.panels,
            rounding=rounding,
            convolutions=profile.rounds_products and fusions.convolve,
            refused=fusions.refused,
        )
    else:
        model = base.clone()
    to_bf16 = partial(narrow, bf16_tensors=tensors, bf16_nodes=nodes)
    return run([to_bf16, drop_unused, infer_types], model)


def narrow(model: ir.Model, bf16_tensors: Collection[str], bf16_nodes: Collection[str]) -> None:
    """Give the nodes of the main graph named in ``bf16_nodes`` bf16 inputs and outputs, and insert casts.

    ``bf16_tensors`` names the initializers stored in bf16. Their type changes here; their data is attached when the
    graph is written. A value is cast at most once in each direction, always from where it was computed, so casts never
    follow each other. Constants inside the graph are rounded instead of cast. The graph's inputs and outputs keep their
    types. The CPU kernel's nodes read their weights as stored, named or not. Requires: types are known, masks are
    clamped, no graph output is an initializer.
    """
    graph, opset = model.graph, model.opset_imports[""]
    forms: dict[ir.Node, Bf16Form] = {}
    for node in graph:
        if node.name in bf16_nodes or node.domain == KERNEL:
            form = bf16_form(node, opset)
            if form is None:
                raise ConversionError(f"node {node.name!r}: {node.op_type} has no bf16 form in opset {opset}")
            forms[node] = form
    values = [value for name, value in graph.initializers.items() if name in bf16_tensors]
    values += [node.outputs[i] for node, form in forms.items() for i in form.outputs]
    chosen = [value for value in values if value.dtype == FLOAT and value.name is not None]
    for computed in chosen:
        computed.type = ir.TensorType(BFLOAT16)
    casts = _Casts(graph, FreshNames(all_value_names(model)))
    for computed in chosen:
        _widen_for_others(computed, forms, casts)
    for node, form in forms.items():
        for index in form.inputs:
            value = node.inputs[index]
            if value is not None and value.dtype == FLOAT:
                node.replace_input_with(index, casts.to(value, BFLOAT16))
    casts.insert()


def _widen_for_others(value: ir.Value, forms: Mapping[ir.Node, Bf16Form], casts: _Casts) -> None:
    """Make every reader of the bf16 ``value`` that does not take bf16, also in subgraphs, read its cast to fp32."""
    for use in tuple(value.uses()):
        form = forms.get(use.node)
        if use.node.op_type not in SHAPE_ONLY and (form is None or use.idx not in form.inputs):
            use.node.replace_input_with(use.idx, casts.to(value, FLOAT))
    if not value.is_graph_output() or value.graph is None:
        return
    name, wide = value.name, casts.to(value, FLOAT)
    for index, output in enumerate(value.graph.outputs):
        if output is value:
            value.graph.outputs[index] = wide
    value.name = casts.fresh.make(f"{name}{NARROWED}")
    wide.name = name


class _Casts:
    """The casts of one graph: one per value and direction, inserted right after the value."""

    def __init__(self, graph: ir.Graph, fresh: FreshNames) -> None:
        self._graph = graph
        self.fresh = fresh
        self._made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def to(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        key = (value, dtype)
        if key not in self._made:
            name, tensor = self.fresh.make(f"{value.name}{NARROWED if dtype == BFLOAT16 else '/fp32'}"), const(value)
            if tensor is not None and value.dtype == FLOAT and stays_inline(tensor):
                rounded = ir.tensor(tensor.numpy().astype(ml_dtypes.bfloat16), name=name)
                self._made[key] = initializer(self._graph, name, rounded)
            else:
                result = ir.node("Cast", [value], attributes={"to": int(dtype)}, name=name).outputs[0]
                result.name, result.type, result.shape = name, ir.TensorType(dtype), value.shape
                self._made[key] = result
        return self._made[key]

    def insert(self) -> None:
        """Insert the new nodes into the graph: after the producer, or first for inputs and initializers."""
        first = next(iter(self._graph), None)
        for (value, _), result in self._made.items():
            cast, producer = result.producer(), value.producer()
            if cast is not None and producer is not None:
                self._graph.insert_after(producer, cast)
            elif cast is not None and first is not None:
                self._graph.insert_before(first, cast)


def _write_with_panels(model: ir.Model, stored: StoredWeights, path: Path) -> None:
    """Write the graph from :func:`build`, reading panels as stored."""
    declared: dict[str, ir.ExternalTensor] = {}
    run([partial(unpanel, stored=stored.tensors, declared=declared)], model)
    _write(model, path, lambda name, shape: _stored(stored, stored.aliases.get(name, name), shape), declared)


def _stored(stored: StoredWeights, name: str, shape: ir.Shape, *, as_fp32: bool = False) -> ir.ExternalTensor:
    """Return a tensor as its file holds it, in the shape that its graph reads; panels are one row of elements.

    With ``as_fp32``, a rounded tensor, or one in an export's file, which is not aligned, is rebuilt at load, in a file
    outside the artifact.
    """
    entry = stored.tensors[name]
    if as_fp32 and (entry.residual is not None or entry.file not in _ALIGNED):
        nbytes = entry.bytes if entry.dtype == "float32" else 2 * entry.bytes
        return ir.ExternalTensor(REBUILT, 0, nbytes, ir.DataType.FLOAT, shape=shape, name=name)
    dtype = ir.DataType(BY_NAME[entry.dtype].onnx)
    return ir.ExternalTensor(entry.file, entry.offset, entry.bytes, dtype, shape=shape, name=name)


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
    for node in model.graph:
        fault = _fault(node, precision, model.opset_imports[""])
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
        is_product = node.op_type.startswith(("MatMul", "Attention", "Conv", *RECURRENT))
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
