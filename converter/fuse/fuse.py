"""Carries out every fusion of a graph in one pass, in which each node belongs to one fusion at most.

A fusion is found and rewritten at the same moment, on the same graph: the next one sees what is left. Attention comes
first, because a normalisation may read its result, and products last, because their epilogues end where others begin.
Graphs for other devices, which read matrices, put the weights in panels together again instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from bf16kit.artifact.manifest import TensorEntry
from bf16kit.converter.fuse.attend import attend
from bf16kit.converter.fuse.average import average
from bf16kit.converter.fuse.bottleneck import bottlenecks, join_bottlenecks
from bf16kit.converter.fuse.convolve import convolve
from bf16kit.converter.fuse.functions import CONVOLUTIONS, Fusing, Fusion
from bf16kit.converter.fuse.multiply import groups, join, look_up, multiply
from bf16kit.converter.fuse.norms import normalise
from bf16kit.converter.fuse.products import panelled_weights
from bf16kit.converter.fuse.recurrent import recur
from bf16kit.converter.fuse.regions import worthwhile
from bf16kit.converter.graph.initializers import const_dims, initializer
from bf16kit.messages.errors import ConversionError
from bf16kit.messages.wording import brief
from bf16kit.numerics.panels import WIDTH
from bf16kit.runtime.ort.kernel import DOMAIN

BFLOAT16 = ir.DataType.BFLOAT16
PUT_TOGETHER = frozenset({"Concat", "Reshape", "Transpose"})  # the operators that put panels together
_SIZE = 2  # bytes of a bfloat16
_VERSION = 1  # of the kernel's domain
_OLDEST_IR = 8  # the first IR version with functions in a model
_FUSIONS: tuple[Callable[[Fusing, ir.Node], Fusion | None], ...] = (
    attend,
    normalise,
    look_up,
    multiply,
    recur,
    convolve,
    average,
)


@dataclass(frozen=True, slots=True)
class Fusions:
    """The fusions ``made`` in a graph, and the weights stored in ``panels``, each with the axis of its columns.

    ``refused`` holds the reason for each node at which a fusion was undone, by the node's name.
    """

    made: tuple[Fusion, ...] = ()
    panels: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def convolve(self) -> bool:
        """Whether the kernel computes convolutions of images in profiles that round products."""
        return any(fusion.kind in CONVOLUTIONS for fusion in self.made)


def fuse(
    base: ir.Model,
    narrow: Collection[str],
    panels: Mapping[str, int] | None = None,
    *,
    rounding: Collection[str] = (),
    convolutions: bool = False,
    refused: Mapping[str, str] | None = None,
) -> tuple[ir.Model, Fusions]:
    """Return a copy of ``base`` in which bf16kit's CPU kernel computes what it can, and a record of that.

    ``narrow`` names the initializers stored in bf16; ``panels`` those stored in panels, by default all that can be.
    Products and attention named in ``rounding`` round what they multiply to bf16. With ``convolutions``, those of
    images are the kernel's too, where that is worthwhile. Nothing is fused at the nodes in ``refused``, nor where a
    fusion raises an error: those nodes are added to the record's.

    Requires: types and shapes are known.
    """
    reasons = dict(refused or {})
    while True:
        fusing = Fusing(base.clone(), narrow, panels or {}, rounding, reasons)
        try:
            images = worthwhile(fusing) if convolutions else []
            fusing.images = frozenset(each.node.name or "" for each in images)
            fusing.blocks = [tuple(each.node.name or "" for each in three) for three in bottlenecks(images)]
            if panels is None:
                kernels = {each.weight.name or "": 0 for each in images if each.panelled}
                fusing.panels = panelled_weights(fusing) | kernels
            made = tuple(_carry_out(fusing))
        except Exception as error:  # a bug must not cost the conversion; the graph may be half rewritten
            if fusing.anchor in reasons:
                raise
            reasons[fusing.anchor] = f"{type(error).__name__}: {brief(str(error))}"
        else:
            _define(fusing.model, fusing.functions)
            _flatten(fusing.graph, fusing.panels)
            return fusing.model, Fusions(made, fusing.panels, reasons)


def _carry_out(fusing: Fusing) -> Iterator[Fusion]:
    graph = fusing.graph
    for find_and_replace in _FUSIONS:
        for node in fusing.at(tuple(graph)):
            fusion = find_and_replace(fusing, node)
            if fusion is not None:
                yield fusion
    for group in groups(graph):
        fusing.anchor = group[0].name or ""
        join(fusing, group)
    join_bottlenecks(fusing)


def _define(model: ir.Model, functions: Mapping[str, ir.Function]) -> None:
    """Define the operators of the kernel that nodes of ``model`` use."""
    used = {node.op_type for node in model.graph if node.domain == DOMAIN}
    used |= {inner.op_type for name in used for inner in functions[name] if inner.domain == DOMAIN}
    if used:
        model.functions.update({functions[name].identifier(): functions[name] for name in functions if name in used})
        model.opset_imports[DOMAIN] = _VERSION
        model.ir_version = max(model.ir_version, _OLDEST_IR)


def _flatten(graph: ir.Graph, panels: Collection[str]) -> None:
    """Give weights in panels that the kernel reads the shape that they have for it, one row of elements.

    Raises :class:`ConversionError` if another node reads one as a matrix.
    """
    for name in sorted(panels & graph.initializers.keys()):
        weight = graph.initializers[name]
        domains = {use.node.domain for use in weight.uses()}
        if DOMAIN not in domains:
            continue
        if len(domains) > 1:
            raise ConversionError(f"weight {name!r}, stored in panels, is read by the kernel and by another node")
        weight.shape = ir.Shape((math.prod(const_dims(weight)),))


# --- panels put together again ----------------------------------------------------------------------------------------


def unpanel(model: ir.Model, stored: Mapping[str, TensorEntry], declared: dict[str, ir.ExternalTensor]) -> None:
    """Make every reader of a matrix that is stored in panels read the matrix put together from them.

    The initializer becomes the panels as the file holds them, ``[P, K, 32]``. A narrower last panel becomes an
    initializer of its own, ``[K, N mod 32]``, of the bytes after them. A Transpose, a Reshape and, with a narrower
    panel, a Concat compute the matrix. They only move constants, so ONNX Runtime runs them once, at load. The file's
    bytes are declared in their own shape. A flat tensor would need a Split and a Reshape, which each copy every weight.

    ``stored`` says how each tensor is stored. ``declared`` gets the external tensors to write, by initializer name.
    Initializers that are no matrices, because something reads the panels themselves, stay as they are. Requires:
    matrices stored in panels have their logical shape, and bf16.
    """
    found = [(value, stored.get(name)) for name, value in model.graph.initializers.items()]
    panelled = [(v, e) for v, e in found if e is not None and e.panels is not None]
    matrices = [(v, e) for v, e in panelled if v.shape is not None and len(v.shape) > 1 and v.uses()]
    if not matrices:  # the graph may have no nodes
        return
    graph, first = Fusing(model), model.graph[0]
    for value, entry in matrices:
        readers = tuple(value.uses())
        matrix = _matrix(value, entry, graph, first, declared)
        for use in readers:
            use.node.replace_input_with(use.idx, matrix)


def _matrix(
    value: ir.Value, entry: TensorEntry, graph: Fusing, first: ir.Node, declared: dict[str, ir.ExternalTensor]
) -> ir.Value:
    """Return the matrix of ``entry``, computed from ``value``, which becomes the panels as the file holds them."""
    columns_first = entry.panels == 0  # [N, K]: a panel holds [w, K] transposed
    k, n = entry.shape if entry.panels else (math.prod(entry.shape[1:]), entry.shape[0])
    count, tail = divmod(n, WIDTH)

    def add(op: str, inputs: Sequence[ir.Value], shape: Sequence[int], **attributes: Any) -> ir.Value:
        node, name = ir.node(op, inputs, attributes), f"{inputs[0].name}/{op.lower()}"
        return graph.insert(node, first, name, ir.TensorType(BFLOAT16), shape)

    def turned(narrow: ir.Value, columns: int) -> ir.Value:
        return add("Transpose", [narrow], (columns, k), perm=[1, 0]) if columns_first else narrow

    def as_stored(matrix: ir.Value) -> ir.Value:
        """Return the tensor of the entry's shape; the rows of a convolution's matrix have their channels last."""
        if len(entry.shape) == 2:
            return matrix
        n, channels, *window = entry.shape
        images = add("Reshape", [matrix, graph.integers("shape", n, *window, channels)], (n, *window, channels))
        return add("Transpose", [images], entry.shape, perm=[0, len(window) + 1, *range(1, len(window) + 1)])

    own = (count, k, WIDTH) if count else (k, tail)
    name = value.name or ""
    declared[name] = value.const_value = _part(name, entry, 0, own)
    value.shape = ir.Shape(own)
    if count == 0:
        return as_stored(turned(value, n))
    perm, moved = ([0, 2, 1], (count, WIDTH, k)) if columns_first else ([1, 0, 2], (k, count, WIDTH))
    shape = (count * WIDTH, k) if columns_first else (k, count * WIDTH)
    whole = add("Reshape", [add("Transpose", [value], moved, perm=perm), graph.integers("shape", *shape)], shape)
    if tail == 0:
        return as_stored(whole)
    name = graph.fresh(f"{value.name}/last")
    declared[name] = _part(name, entry, count * k * WIDTH, (k, tail))
    last = initializer(graph.graph, name, declared[name])
    joined = add("Concat", [whole, turned(last, tail)], (n, k) if columns_first else (k, n), axis=entry.panels)
    return as_stored(joined)


def _part(name: str, entry: TensorEntry, first: int, shape: Sequence[int]) -> ir.ExternalTensor:
    """Return the elements of ``entry`` from ``first`` on, as its file holds them, declared to have ``shape``."""
    offset, length = entry.offset + _SIZE * first, _SIZE * math.prod(shape)
    return ir.ExternalTensor(entry.file, offset, length, BFLOAT16, shape=ir.Shape(shape), name=name)
