"""A torch.export program as a value: its inputs, and its operators with their arguments and outputs.

It is read from the archive's JSON by whitelist: an unknown operator, argument or kind of output is rejected by name.
The rest of the JSON (guards, shape expressions, stack traces, the tree of inputs) is ignored, except for the names in
the tree of outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.exported import arguments, operators
from bf16kit.runtime.exported.aliases import check_writes
from bf16kit.runtime.exported.outputs import output_names
from bf16kit.runtime.exported.values import (
    DTYPES,
    field,
    integer,
    listed,
    mapping,
    name,
    text,
    union,
)

SCHEMA = 8  # the major version of torch's schema that this module reads
_DEEPEST = 8  # depth of nested graphs
_MOST = 1_000_000  # nodes
_ATEN = re.compile(r"torch\.ops\.aten\.([A-Za-z0-9_]{1,80})\.([A-Za-z0-9_]{1,80})")
_SYMBOL = re.compile(r"Symbol\('([A-Za-z_][A-Za-z0-9_]{0,99})'(, [a-z]+=(True|False))*\)")
_POSITIONAL = 1


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor that the program takes.

    A free dimension is the program's symbol for it, or "?" for an expression of several symbols.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One call. ``outputs`` names its results: None for one that is never read, a tuple of names for a list of tensors.

    If ``single``, the call returns one value, which gets the only name; otherwise each item of the result has its own.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Any, ...]
    single: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in order; ``results`` are the graph's outputs, :class:`Ref` or plain values."""

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A whole program: ``tensors`` maps a value of the graph to the stored tensor that it stands for.

    ``outputs`` are names for ``graph.results``, "" for those that are no tensors.
    """

    inputs: tuple[TensorInput, ...]
    tensors: Mapping[str, str]
    graph: Graph
    outputs: tuple[str, ...]


def parse_program(program: Mapping[str, Any], stored: Mapping[str, object]) -> Program:
    """Parse the program in the JSON of an archive whose tensors are ``stored``.

    Raises :class:`RuntimeFailure` for another schema, for anything not on the whitelist, and for a program that keeps
    state, has inputs or outputs that are no tensors, or reads a tensor that the archive does not hold.
    """
    version = mapping(field(program, "schema_version"), "schema_version")
    major = integer(field(version, "major"), "schema_version")
    if major != SCHEMA:
        raise RuntimeFailure(f"has schema version {major} of torch.export, but bf16kit reads {SCHEMA}; save it again")
    module = mapping(field(program, "graph_module"), "graph_module")
    signature = mapping(field(module, "signature"), "signature")
    values = mapping(field(module, "graph"), "graph")
    inputs, tensors = _inputs(signature, mapping(field(values, "tensor_values"), "tensor_values"))
    for value, fqn in tensors.items():
        if fqn not in stored:
            raise RuntimeFailure(f"reads a tensor {fqn!r} ({value}), which the archive does not hold")
    _check_outputs(signature)
    graph = _graph(values, 0)
    check_writes(graph)
    return Program(inputs, tensors, graph, output_names(module, graph.results, [each.name for each in inputs]))


def _inputs(signature: Mapping[str, Any], metas: Mapping[str, Any]) -> tuple[tuple[TensorInput, ...], dict[str, str]]:
    inputs: list[TensorInput] = []
    tensors: dict[str, str] = {}
    for spec in listed(field(signature, "input_specs"), "input_specs"):
        kind, value = union(spec, "input_specs")
        if kind == "constant_input":  # None, or a number that was fixed at export
            continue
        if kind == "user_input":
            tag, argument = union(field(mapping(value, kind), "arg"), kind)
            if tag == "as_none":
                continue
            if tag != "as_tensor":
                raise RuntimeFailure(f"has a non-tensor input ({tag.removeprefix('as_')}); export it without")
            input_name = name(field(mapping(argument, kind), "name"), kind)
            inputs.append(_tensor_input(input_name, metas))
            continue
        name_field = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}
        if kind not in name_field:
            raise RuntimeFailure(f"has an input of kind {kind[:80]!r}, which is not a tensor")
        spec_fields = mapping(value, kind)
        value_name = name(field(mapping(field(spec_fields, "arg"), kind), "name"), kind)
        tensors[value_name] = text(field(spec_fields, name_field[kind]), kind)
    if not inputs:
        raise RuntimeFailure("has no input that is a tensor")
    return tuple(inputs), tensors


def _tensor_input(name: str, metas: Mapping[str, Any]) -> TensorInput:
    what = f"input {name!r}"
    meta = mapping(field(metas, name), what)
    code = integer(field(meta, "dtype"), what)
    if code not in DTYPES:
        raise RuntimeFailure(f"{what} has torch's scalar type {code}, which bf16kit does not support")
    return TensorInput(name, DTYPES[code], tuple(_dim(size, what) for size in listed(field(meta, "sizes"), what)))


def _dim(size: Any, what: str) -> int | str:
    tag, value = union(size, what)
    if tag == "as_int":
        return integer(value, what)
    found = _SYMBOL.fullmatch(text(field(mapping(value, what), "expr_str"), what))
    return found[1] if found else "?"


def _check_outputs(signature: Mapping[str, Any]) -> None:
    for spec in listed(field(signature, "output_specs"), "output_specs"):
        kind, value = union(spec, "output_specs")
        if kind != "user_output":
            of = mapping(value, kind).get("buffer_name", "")
            raise RuntimeFailure(
                f"keeps a state ({kind.replace('_', ' ')[:80]} {str(of)[:200]}), which a served model cannot;"
                " export the module in evaluation mode, its state as inputs and outputs"
            )


def _graph(found: Mapping[str, Any], depth: int) -> Graph:
    if depth > _DEEPEST:
        raise RuntimeFailure(f"nests graphs more than {_DEEPEST} deep")
    inputs = tuple(filter(None, (_input_name(value) for value in listed(field(found, "inputs"), "inputs"))))
    nodes = listed(field(found, "nodes"), "nodes")
    if len(nodes) > _MOST:
        raise RuntimeFailure(f"has {len(nodes)} nodes, over the limit of {_MOST}")
    return Graph(
        inputs,
        tuple(node for each in nodes if (node := _node(mapping(each, "nodes"), depth)) is not None),
        tuple(
            arguments.read_argument(value, "outputs", _no_graph) for value in listed(field(found, "outputs"), "outputs")
        ),
    )


def _no_graph(_graph: Any) -> Any:
    raise RuntimeFailure("gives a graph")


def _input_name(value: Any) -> str | None:
    tag, argument = union(value, "inputs")
    if tag == "as_tensor":
        return name(field(mapping(argument, "inputs"), "name"), "inputs")
    if tag == "as_sym_int":
        return name(field(mapping(argument, "inputs"), "as_name"), "inputs")
    if tag in ("as_none", "as_int", "as_float", "as_bool", "as_string"):
        return None
    raise RuntimeFailure(f"has an input of kind {tag[:80]!r}, which is not a tensor")


def _node(node: Mapping[str, Any], depth: int) -> Node | None:
    target = text(field(node, "target"), "target")
    operator = _operator(target)
    if operator in operators.CHECKS:
        return None
    what = f"operator {target!r}"

    def inner(graph: Any) -> Graph:
        return _graph(mapping(graph, what), depth + 1)

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for given in listed(field(node, "inputs"), what):
        argument = mapping(given, what)
        value = arguments.read_argument(field(argument, "arg"), what, inner)
        named = text(argument.get("name", ""), what)
        if argument.get("kind") == _POSITIONAL or not named or not operator:
            args.append(value)
        else:
            kwargs[name(named, what)] = value
    outputs = [union(value, what) for value in listed(field(node, "outputs"), what)]
    single = len(outputs) == 1 and outputs[0][0] in ("as_tensor", "as_sym_int", "as_sym_bool", "as_sym_float")
    if not operator and target in (operators.GRAD_MODE, operators.AUTOCAST):
        single = False  # a wrapped graph returns a list of results, even if it has only one
    if len(outputs) == 1 and outputs[0][0] == "as_tensors":
        names = _names(outputs[0][1], what)
        return Node(target, tuple(args), kwargs, names, single=False)
    return Node(target, tuple(args), kwargs, tuple(_output(*value, what) for value in outputs), single)


def _operator(target: str) -> str:
    """Return the name of an ATen operator, or "" for another known function.

    Raises :class:`RuntimeFailure` for one that is not allowed.
    """
    found = _ATEN.fullmatch(target)
    if found is not None and "out" not in found[2].split("_"):
        if found[1] in operators.ATEN or found[1] in operators.IN_PLACE or found[1] in operators.CHECKS:
            return found[1]
    elif target in operators.SYMBOLIC or target in (operators.GRAD_MODE, operators.AUTOCAST):
        return ""
    raise RuntimeFailure(
        f"uses the operator {target[:200]!r}, which bf16kit does not run; if it is torch's own and computes on"
        " tensors only, ep.run_decompositions() may express it in other operators"
    )


def _output(tag: str, value: Any, what: str) -> Any:
    if tag == "as_none":
        return None
    if tag == "as_tensor":
        return name(field(mapping(value, what), "name"), what)
    if tag in ("as_sym_int", "as_sym_bool", "as_sym_float"):
        return name(field(mapping(value, what), "as_name"), what)
    if tag == "as_tensors":
        return _names(value, what)
    raise RuntimeFailure(f"{what} gives a value of kind {tag[:80]!r}, which bf16kit does not know")


def _names(value: Any, what: str) -> tuple[str, ...]:
    return tuple(name(field(mapping(each, what), "name"), what) for each in listed(value, what))
