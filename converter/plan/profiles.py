"""The profiles that ONNX Runtime runs: each one's base graph, device, and decision for each node, with its reason.

A node computes in bf16 if the provider has a kernel for it and it reads data that varies. It stays in fp32 if bf16
would cost accuracy for nothing, as for positions and masks computed from integers. It also stays if bf16 would only add
casts: for a node alone between fp32 islands, or one that only moves fp32 data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import onnx_ir as ir

from bf16kit.converter.fuse.functions import Fusion, Kind
from bf16kit.converter.graph.cuda_kernels import KernelTable
from bf16kit.converter.graph.operators import (
    CONTROL_FLOW,
    MOVEMENT,
    NORMALISATIONS,
    PRODUCTS,
    bf16_form,
    label,
    since_version,
)
from bf16kit.converter.plan.decisions import Decision, Overrides, bf16, fp32
from bf16kit.converter.rewrite import Prepared

FLOAT = ir.DataType.FLOAT
RECURRED = fp32("profile", "bf16 weights, fp32 activations and accumulation in the CPU kernel's recurrence")
_FUSED: Mapping[Kind, Decision] = {
    "attention": fp32("profile", "computed by the CPU kernel's attention"),
    "normalisation": fp32("profile", "computed by the CPU kernel's normalisation"),
    "lookup": bf16("looks_up", "looks rows up in the bf16 table, in panels, and widens them, in the CPU kernel"),
    "convolution": fp32("profile", "computed by the CPU kernel together with a convolution"),
    "depthwise": fp32("profile", "convolves each channel in fp32, by a bf16 weight, in the CPU kernel"),
    "product": fp32("profile", "computed by the CPU kernel together with the product before it"),
    "recurrence": RECURRED,
}
_MULTIPLIED = fp32("profile", "bf16 weight, fp32 activations and accumulation in the CPU kernel")
_MULTIPLIED_ROUNDED = bf16(
    "rounds", "bf16 weight, activations rounded to bf16 before they are multiplied, fp32 accumulation"
)
_ATTENDED_ROUNDED = bf16("rounds", "inputs rounded to bf16, fp32 accumulation, in the CPU kernel's attention")
Place = Callable[[ir.Model, frozenset[str], KernelTable, Overrides, Sequence[Fusion]], Mapping[str, Decision]]


@dataclass(frozen=True, slots=True)
class Profile:
    """One way to run a model.

    ``graph`` names the prepared graph that the profile starts from, and ``place`` decides for each node of it.
    ``device`` is the device it is for; if there is none, it is emulated on the CPU. With ``rounds``, nodes computed in
    bf16 round their inputs and outputs; otherwise only weights are rounded. With ``rounds_products``, products also
    round their other inputs, and the kernel computes convolutions of images too, where it gains nothing otherwise. With
    ``uses_kernel``, bf16kit's CPU kernel computes the products and needs their weights in panels. With ``searched``,
    islands are searched for if the profile is over budget.
    """

    name: str
    precision: str
    graph: Literal["base", "cuda"]
    place: Place
    device: str
    rounds: bool = False
    uses_kernel: bool = False
    rounds_products: bool = False
    searched: bool = True

    def base(self, prepared: Prepared) -> ir.Model:
        """Return the prepared graph that the profile starts from."""
        return prepared.base if self.graph == "base" else prepared.cuda


def place_cpu(
    model: ir.Model, narrow: Collection[str], _kernels: KernelTable, _overrides: Overrides, fusions: Sequence[Fusion]
) -> dict[str, Decision]:
    """Decide for the cpu profile: everything computes in fp32, but tables are looked up as they are stored.

    ``narrow`` names the initializers stored in bf16; ``fusions`` are those of ``model``. ONNX Runtime
    would widen a whole table at load. If rows are looked up first and then widened, the table stays in memory at half
    the size. The kernel likewise keeps its products' weights in bf16. Their precision is fp32 all the same: widening is
    exact, and nothing else is rounded.
    """
    decisions: dict[str, Decision] = {}
    for node in model.graph.all_nodes():
        looks_up = node.op_type == "Gather" and node.domain == "" and node.graph is model.graph
        if looks_up and _are_among(node.inputs[:1], narrow):
            found = bf16("looks_up", "looks rows up in the bf16 table; they are widened afterwards")
        elif _are_among(node.inputs, narrow):
            found = fp32("profile", "computes in fp32, from a bf16 weight that is widened at load")
        else:
            found = fp32("profile", "the cpu profile computes in fp32")
        decisions[node.name or ""] = found
    for fusion in fusions:
        decisions |= dict.fromkeys(fusion.nodes, _FUSED[fusion.kind])
        if fusion.kind in ("product", "convolution"):
            decisions[fusion.node] = _MULTIPLIED
    return decisions


def place_cpu_bf16(
    model: ir.Model, narrow: Collection[str], kernels: KernelTable, overrides: Overrides, fusions: Sequence[Fusion]
) -> dict[str, Decision]:
    """Decide for the cpu-bf16 profile: as for cpu, but the kernel's products round their activations to bf16.

    A product kept in fp32 does not round what it reads, as in the cpu profile. A node of an attention kept in fp32
    keeps the whole attention in fp32.
    """
    decisions = place_cpu(model, narrow, kernels, overrides, fusions)
    for fusion in fusions:
        if fusion.kind in ("product", "convolution", "recurrence"):
            decisions[fusion.node] = overrides.node_override(fusion.node) or _MULTIPLIED_ROUNDED
        elif fusion.kind == "attention":  # the product of queries and keys, the softmax, the product with the values
            names = (fusion.nodes[0], fusion.anchor, fusion.node)
            kept = {name: decision for name in names if (decision := overrides.node_override(name)) is not None}
            decisions |= kept or dict.fromkeys((names[0], names[-1]), _ATTENDED_ROUNDED)
    return decisions


def place_cuda(
    model: ir.Model, narrow: Collection[str], kernels: KernelTable, overrides: Overrides, _fusions: Sequence[Fusion]
) -> dict[str, Decision]:
    """Decide for the cuda profile, for every node of ``model``, including those in subgraphs."""
    opset, varying = model.opset_imports[""], _varying(model.graph, narrow)
    inner = fp32("control_flow", "inside the body of a control-flow node, which stays in fp32")
    decisions = {node.name or "": inner for body in model.graph.subgraphs() for node in body}
    accepted: dict[ir.Node, None] = {}  # in the order of the graph
    for node in model.graph:
        decision = _island(node, opset, kernels, overrides) or _bf16(node, varying, overrides)
        decisions[node.name or ""] = decision
        if decision.precision == "bf16":
            accepted[node] = None
    asked_for = {node for node in accepted if decisions[node.name or ""].code == "asked_for"}
    for node in [node for node in accepted if node.op_type in MOVEMENT and node not in asked_for]:
        form = bf16_form(node, opset)
        moved = (node.inputs[i] for i in (form.inputs if form else ()) if i == 0 or node.op_type == "Concat")
        moved_floats = [value for value in moved if value is not None and value.dtype == FLOAT]
        if not _are_among(moved_floats, narrow) and not any(v.producer() in accepted for v in moved_floats):
            del accepted[node]
            decisions[node.name or ""] = fp32("moves", "moves fp32 data")
    useful = [n for n in accepted if n.op_type in PRODUCTS or n in asked_for or _are_among(n.inputs, narrow)]
    for node in accepted.keys() - _connected(useful, accepted):
        reason = "no bf16 product is near it, so casts would cost more than bf16 saves"
        decisions[node.name or ""] = fp32("alone", reason)
    return decisions


def _island(node: ir.Node, opset: int, kernels: KernelTable, overrides: Overrides) -> Decision | None:
    """Return why ``node`` cannot or must not compute in bf16; None if it may."""
    if node.op_type in CONTROL_FLOW:
        return fp32("control_flow", f"{node.op_type} runs its body in fp32")
    if FLOAT not in [o.dtype for o in node.outputs if o.name] or node.op_type == "Cast":
        return fp32("no_floats", f"gives {_dtypes(node)}, nothing to narrow")
    if (kept := overrides.node_override(node.name or "")) is not None:
        return kept
    if node.op_type in NORMALISATIONS and overrides.bf16_pattern(node.name or "") is None:
        return fp32("normalises", "normalisation computes in fp32 with fp32 scale and bias, as in torch.autocast")
    since, form = since_version(node, opset), bf16_form(node, opset)
    if since is None:
        return fp32("unknown", f"{label(node)} is not an operator of opset {opset}, so its types are unknown")
    if not kernels.has_bf16_kernel(node.domain, node.op_type, since):
        reason = f"no bf16 kernel for {label(node)}-{since} on CUDA in ONNX Runtime {kernels.onnxruntime}"
        return fp32("no_kernel", reason)
    if form is None:
        return fp32("no_form", f"{label(node)}-{since} has no bf16 form")
    unknown = [v for i in form.inputs if (v := node.inputs[i]) is not None and v.dtype is None]
    if unknown or any(node.outputs[i].dtype != FLOAT for i in form.outputs if node.outputs[i].name):
        return fp32("unknown", "the dtype of an input or output is not known to be fp32")
    return None


def _bf16(node: ir.Node, varying: Collection[ir.Value | None], overrides: Overrides) -> Decision:
    """Decide for a node that may compute in bf16."""
    if (pattern := overrides.bf16_pattern(node.name or "")) is not None:
        return bf16("asked_for", f"requested by --bf16 {pattern}")
    if not any(value in varying for value in node.inputs):
        reason = "computed only from integers and constants (positions, masks): exact in fp32, and small"
        return fp32("not_varying", reason)
    if node.op_type in PRODUCTS:
        return bf16("product", "bf16 multiplication with fp32 accumulation")
    return bf16("moves", "moves bf16 data") if node.op_type in MOVEMENT else bf16("kernel", "has a bf16 kernel")


def _connected(starts: Iterable[ir.Node], among: Collection[ir.Node]) -> set[ir.Node]:
    """Return the nodes ``among`` which floats lead from or to one of ``starts``, through others of these nodes."""
    found, waiting = set[ir.Node](), list(starts)
    while waiting:
        node = waiting.pop()
        if node not in found and node in among:
            found.add(node)
            producers = (value.producer() for value in node.inputs if value is not None and value.dtype == FLOAT)
            waiting += [producer for producer in producers if producer is not None]
            waiting += [use.node for value in node.outputs if value.dtype == FLOAT for use in value.uses()]
    return found


def _are_among(values: Iterable[ir.Value | None], narrow: Collection[str]) -> bool:
    """Whether any of ``values`` is one of the tensors in ``narrow``."""
    return any(value is not None and value.name in narrow for value in values)


def _varying(graph: ir.Graph, narrow: Collection[str]) -> set[ir.Value | None]:
    """Return the values that depend on an fp32 input of the model or on a weight stored in bf16."""
    found: set[ir.Value | None] = {v for v in graph.inputs if v.dtype == FLOAT}
    found |= {v for name, v in graph.initializers.items() if name in narrow}
    for node in graph:
        bodies = (a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH)
        inner = (value for body in bodies for each in body.all_nodes() for value in each.inputs)
        if any(value in found for value in (*node.inputs, *inner)):
            found.update(o for o in node.outputs if o.dtype in (FLOAT, None))
    return found


def _dtypes(node: ir.Node) -> str:
    names = sorted({"unknown" if o.dtype is None else o.dtype.name.lower() for o in node.outputs if o.name})
    return ", ".join("fp32" if name == "float" else name for name in names) or "nothing"


_CPU = Profile("cpu", "bf16-weights", "base", place_cpu, "cpu", uses_kernel=True)
_CPU_BF16 = replace(_CPU, name="cpu-bf16", precision="bf16", place=place_cpu_bf16, rounds_products=True, searched=False)
_CUDA = Profile("cuda", "bf16", "cuda", place_cuda, "cuda:0", rounds=True)

PROFILES: Mapping[str, Profile] = {profile.name: profile for profile in (_CPU, _CPU_BF16, _CUDA)}
