"""Decides which nodes of a graph compute in bf16 and which are fp32 islands, with the reason for each.

A node computes in bf16 if the provider has a kernel for it and it reads data that varies. It stays in fp32 if bf16
would cost accuracy for nothing, as for positions and masks computed from integers. It also stays if bf16 would only add
casts: for a node alone between fp32 islands, or one that only moves fp32 data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from converter.fuse.functions import Fusion, Kind
from converter.graph.cuda_kernels import KernelTable
from converter.graph.operators import (
    CONTROL_FLOW,
    MOVEMENT,
    NORMALISATIONS,
    PRODUCTS,
    Bf16Form,
    bf16_form,
    label,
    since_version,
)
from converter.plan.decisions import Code, Decision, Overrides

FLOAT = ir.DataType.FLOAT
_FUSED: Mapping[Kind, Decision] = {
    "attention": Decision("fp32", "profile", "computed by the CPU kernel's attention"),
    "normalisation": Decision("fp32", "profile", "computed by the CPU kernel's normalisation"),
    "lookup": Decision(
        "bf16", "looks_up", "looks rows up in the bf16 table, in panels, and widens them, in the CPU kernel"
    ),
    "product": Decision("fp32", "profile", "computed by the CPU kernel together with the product before it"),
}
_MULTIPLIED = Decision("fp32", "profile", "bf16 weight, fp32 activations and accumulation in the CPU kernel")


def place_cpu(model: ir.Model, narrow: Collection[str], fusions: Sequence[Fusion]) -> dict[str, Decision]:
    """Decide for the cpu profile: everything computes in fp32, but tables are looked up as they are stored.

    ``narrow`` names the initializers stored in bf16; ``fusions`` are those of ``model``. ONNX Runtime
    would widen a whole table at load. If rows are looked up first and then widened, the table stays in memory at half
    the size. The kernel likewise keeps its products' weights in bf16. Their precision is fp32 all the same: widening is
    exact, and nothing else is rounded.
    """
    decisions: dict[str, Decision] = {}
    for node in model.graph.all_nodes():
        if _looks_up(node, narrow) and node.graph is model.graph:
            decisions[_name(node)] = Decision(
                "bf16", "looks_up", "looks rows up in the bf16 table; they are widened afterwards"
            )
        elif _reads(node, narrow):
            decisions[_name(node)] = Decision(
                "fp32", "profile", "computes in fp32, from a bf16 weight that is widened at load"
            )
        else:
            decisions[_name(node)] = Decision("fp32", "profile", "the cpu profile computes in fp32")
    for fusion in fusions:
        decisions |= dict.fromkeys(fusion.nodes, _FUSED[fusion.kind])
        if fusion.kind == "product":
            decisions[fusion.node] = _MULTIPLIED
    return decisions


def place_cpu_bf16(
    model: ir.Model, narrow: Collection[str], overrides: Overrides, fusions: Sequence[Fusion]
) -> dict[str, Decision]:
    """Decide for the cpu-bf16 profile: as for cpu, but the kernel's products round their activations to bf16.

    A product kept in fp32 does not round what it reads, as in the cpu profile. A node of an attention kept in fp32
    keeps the whole attention in fp32.
    """
    decisions = place_cpu(model, narrow, fusions)
    for fusion in fusions:
        if fusion.kind == "product":
            decisions[fusion.node] = overrides.node_override(fusion.node) or Decision(
                "bf16",
                "rounds",
                "bf16 weight, activations rounded to bf16 before they are multiplied, fp32 accumulation",
            )
        elif fusion.kind == "attention":  # the product of queries and keys, the softmax, the product with the values
            names = (fusion.nodes[0], fusion.anchor, fusion.node)
            kept = {name: decision for name in names if (decision := overrides.node_override(name)) is not None}
            rounds = Decision(
                "bf16", "rounds", "inputs rounded to bf16, fp32 accumulation, in the CPU kernel's attention"
            )
            decisions |= kept or dict.fromkeys((names[0], names[-1]), rounds)
    return decisions


def place_cuda(
    model: ir.Model, narrow: Collection[str], kernels: KernelTable, overrides: Overrides
) -> dict[str, Decision]:
    """Decide for the cuda profile, for every node of ``model``, including those in subgraphs."""
    decisions: dict[str, Decision] = {}
    forms: dict[ir.Node, Bf16Form] = {}
    opset = model.opset_imports[""]
    varying = _varying(model.graph, narrow)
    for node in model.graph:
        island = _island(node, opset, kernels, overrides) or _pointless(node, varying, overrides)
        if island is not None:
            decisions[_name(node)] = island
            continue
        forms[node] = bf16_form(node, opset) or Bf16Form((), ())
        decisions[_name(node)] = _accept(node, overrides)
    _withdraw(forms, narrow, overrides, decisions)
    for body in model.graph.subgraphs():
        for node in body:
            decisions[_name(node)] = Decision(
                "fp32", "control_flow", "inside the body of a control-flow node, which stays in fp32"
            )
    return decisions


def _island(node: ir.Node, opset: int, kernels: KernelTable, overrides: Overrides) -> Decision | None:
    """Return why ``node`` cannot or must not compute in bf16; None if it may."""
    if node.op_type in CONTROL_FLOW:
        return _fp32("control_flow", f"{node.op_type} runs its body in fp32")
    if FLOAT not in [o.dtype for o in node.outputs if o.name] or node.op_type == "Cast":
        return _fp32("no_floats", f"gives {_dtypes(node)}, nothing to narrow")
    kept = overrides.node_override(_name(node))
    if kept is not None:
        return kept
    if node.op_type in NORMALISATIONS and overrides.bf16_pattern(_name(node)) is None:
        return _fp32("normalises", "normalisation computes in fp32 with fp32 scale and bias, as in torch.autocast")
    return _without_kernel(node, opset, kernels)


def _without_kernel(node: ir.Node, opset: int, kernels: KernelTable) -> Decision | None:
    """Return why no kernel runs ``node`` in bf16; None if one does."""
    since = since_version(node, opset)
    if since is None:
        return _fp32("unknown", f"{label(node)} is not an operator of opset {opset}, so its types are unknown")
    if not kernels.has_bf16_kernel(node.domain, node.op_type, since):
        reason = f"no bf16 kernel for {label(node)}-{since} on CUDA in ONNX Runtime {kernels.onnxruntime}"
        return _fp32("no_kernel", reason)
    form = bf16_form(node, opset)
    if form is None:
        return _fp32("no_form", f"{label(node)}-{since} has no bf16 form")
    unknown = [v for i in form.inputs if (v := node.inputs[i]) is not None and v.dtype is None]
    if unknown or any(node.outputs[i].dtype != FLOAT for i in form.outputs if node.outputs[i].name):
        return _fp32("unknown", "the dtype of an input or output is not known to be fp32")
    return None


def _fp32(code: Code, reason: str) -> Decision:
    return Decision("fp32", code, reason)


def _pointless(node: ir.Node, varying: Collection[ir.Value], overrides: Overrides) -> Decision | None:
    if overrides.bf16_pattern(_name(node)) is not None or any(v in varying for v in node.inputs if v is not None):
        return None
    return _fp32(
        "not_varying", "computed only from integers and constants (positions, masks): exact in fp32, and small"
    )


def _accept(node: ir.Node, overrides: Overrides) -> Decision:
    pattern = overrides.bf16_pattern(_name(node))
    if pattern is not None:
        return Decision("bf16", "asked_for", f"requested by --bf16 {pattern}")
    if node.op_type in PRODUCTS:
        return Decision("bf16", "product", "bf16 multiplication with fp32 accumulation")
    if node.op_type in MOVEMENT:
        return Decision("bf16", "moves", "moves bf16 data")
    return Decision("bf16", "kernel", "has a bf16 kernel")


def _withdraw(
    forms: dict[ir.Node, Bf16Form], narrow: Collection[str], overrides: Overrides, decisions: dict[str, Decision]
) -> None:
    """Withdraw decisions for bf16 that would only add casts; ``forms`` holds the accepted nodes, in graph order."""
    forced = {node for node in forms if overrides.bf16_pattern(_name(node)) is not None}
    for node in [n for n in forms if n.op_type in MOVEMENT and n not in forced]:
        if not any(v.producer() in forms or v.name in narrow for v in _data(node, forms[node])):
            del forms[node]
            decisions[_name(node)] = Decision("fp32", "moves", "moves fp32 data")
    for group in _groups(forms):
        useful = any(n.op_type in PRODUCTS or n in forced or _reads(n, narrow) for n in group)
        if not useful:
            for node in group:
                decisions[_name(node)] = Decision(
                    "fp32", "alone", "no bf16 product is near it, so casts would cost more than bf16 saves"
                )


def _groups(forms: dict[ir.Node, Bf16Form]) -> list[set[ir.Node]]:
    """Split the accepted nodes into groups that pass bf16 values among themselves."""
    groups: list[set[ir.Node]] = []
    seen: set[ir.Node] = set()
    for start in forms:
        group, waiting = set[ir.Node](), [start]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                group.add(node)
                waiting.extend(n for n in _neighbours(node, forms[node]) if n in forms)
        if group:
            groups.append(group)
    return groups


def _neighbours(node: ir.Node, form: Bf16Form) -> Iterator[ir.Node]:
    for value in (node.inputs[i] for i in form.inputs):
        producer = None if value is None else value.producer()
        if producer is not None:
            yield producer
    for index in form.outputs:
        yield from (use.node for use in node.outputs[index].uses())


def _reads(node: ir.Node, narrow: Collection[str]) -> bool:
    return any(value is not None and value.name in narrow for value in node.inputs)


def _data(node: ir.Node, form: Bf16Form) -> Iterator[ir.Value]:
    """Yield the fp32 inputs that would become bf16; for a node that moves data, only the data."""
    positions: Iterable[int] = form.inputs
    if node.op_type in MOVEMENT and node.op_type != "Concat":
        positions = [i for i in form.inputs if i == 0]
    for index in positions:
        value = node.inputs[index]
        if value is not None and value.dtype == FLOAT:
            yield value


def _varying(graph: ir.Graph, narrow: Collection[str]) -> set[ir.Value]:
    """Return the values that depend on an fp32 input of the model or on a weight stored in bf16."""
    found = {v for v in graph.inputs if v.dtype == FLOAT}
    found |= {v for name, v in graph.initializers.items() if name in narrow}
    for node in graph:
        inner = (v for body in _bodies(node) for n in body.all_nodes() for v in n.inputs)
        if any(v in found for v in (*node.inputs, *inner)):
            found.update(o for o in node.outputs if o.dtype in (FLOAT, None))
    return found


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _looks_up(node: ir.Node, narrow: Collection[str]) -> bool:
    table = node.inputs[0] if node.inputs else None
    return node.op_type == "Gather" and node.domain == "" and table is not None and table.name in narrow


def _dtypes(node: ir.Node) -> str:
    names = sorted({"unknown" if o.dtype is None else o.dtype.name.lower() for o in node.outputs if o.name})
    return ", ".join("fp32" if name == "float" else name for name in names) or "nothing"


def _name(node: ir.Node) -> str:
    return node.name or ""
