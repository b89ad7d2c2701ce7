"""Compares a graph's fusions with the nodes that they replace, at fp32 noise.

One graph holds both: the unfused graph and, beside it, every node that the fused graph has instead. These read the
unfused graph's values, so each fusion is judged alone, with neither the noise nor the faults of those before it. All
other nodes of the fused graph are equal to the unfused one's, so if every value that is computed otherwise is the same,
both graphs compute the same outputs. Drift could not tell: a mask of -5 instead of minus infinity, or a scale that is
off by 1 %, costs less than bf16 may.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from bf16kit.converter.fuse.functions import Fusion, Kind
from bf16kit.converter.source import Array, Feeds
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import BY_ONNX, TensorSpec
from bf16kit.runtime.ort.onnx import OnnxRuntime

_PREFIX = "fused:"
# The error allowed, of a slice's own magnitude and of the magnitude that slices along its axis have. Terms of a sum may
# be larger than the sum: far below zero, Gelu is a small difference of large numbers.
# docs/decisions/0008-rewrites-and-fusions.md has what sound fusions show.
_OWN = 1e-5
_TYPICAL: Mapping[Kind, float] = {
    "attention": 5e-6,
    "normalisation": 5e-6,
    "lookup": 0.0,
    "product": 5e-5,
    "convolution": 5e-5,
    "depthwise": 5e-5,
    "recurrence": 5e-5,
}
_SMALLEST = 1e-37
_FLOAT = onnx.TensorProto.FLOAT
_SAMPLES = 2  # taken as they are; a fusion computes the same for all
_SEED = 0


def faults(
    unfused: Path, fused: Path, fusions: Sequence[Fusion], inputs: Sequence[TensorSpec], feeds: Sequence[Feeds]
) -> dict[str, str]:
    """Return why some of ``fusions`` in the graph ``fused`` must be undone, by their anchors' names.

    Both graphs read the weights beside ``fused``. They run on :func:`~bf16kit.converter.fuse.check.variants` of
    ``feeds``; those that the unfused graph cannot run, or for which it gives NaN, are left out.
    """
    alone = onnx.load(unfused, load_external_data=False)
    both, compared = beside(alone, onnx.load(fused, load_external_data=False))
    owners = {name: fusion for fusion in fusions for name in fusion.outputs}
    found: dict[str, str] = {}
    try:
        runtime = _open(both, inputs, [*compared, *(_PREFIX + name for name in compared)], fused.parent)
        for feed in variants(inputs, feeds):
            try:
                answers = runtime.run(feed)
            except RuntimeFailure as error:
                if _runs(alone, inputs, feed, fused.parent):
                    return found | _blamed(fusions, error)
                continue
            for name in compared:
                owner = owners.get(name)
                typical = _TYPICAL["normalisation" if owner is None else owner.kind]
                excess = excess_of(answers[name], answers[_PREFIX + name], typical)
                if excess > 1:
                    reason = f"its result differs by {excess:.3g} times the fp32 noise allowed"
                    at_fault = fusions if owner is None else [owner]
                    found = {fusion.anchor: reason for fusion in at_fault} | found
    except RuntimeFailure as error:  # not opened
        return _blamed(fusions, error)
    return found


def beside(unfused: onnx.ModelProto, fused: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Return ``unfused`` with the nodes of ``fused`` that differ from its own, and the values that these compute again.

    The added nodes, their outputs and initializers have prefixed names. They read the unfused graph's values wherever
    it has the value. All values computed again are outputs, under both names.
    """
    both = onnx.ModelProto()
    both.CopyFrom(unfused)
    computed = {name for node in unfused.graph.node for name in node.output if name}
    known = computed | {value.name for value in unfused.graph.input}
    stored = {tensor.name: tensor for tensor in fused.graph.initializer}
    same = {tensor.name for tensor in unfused.graph.initializer if stored.get(tensor.name) == tensor}
    nodes = {node.SerializeToString(deterministic=True) for node in unfused.graph.node}
    compared: list[str] = []
    added: set[str] = set()
    for node in fused.graph.node:
        changed = any(name in stored and name not in same for name in node.input)
        if not changed and node.SerializeToString(deterministic=True) in nodes:
            continue
        copy = both.graph.node.add()
        copy.CopyFrom(node)
        copy.name = _PREFIX + node.name
        copy.input[:] = [name if name in known or not name else _PREFIX + name for name in node.input]
        copy.output[:] = [name and _PREFIX + name for name in node.output]
        compared += [name for name in node.output if name in computed]
        added |= stored.keys() & set(node.input)
    for name in sorted(added):
        tensor = both.graph.initializer.add()
        tensor.CopyFrom(stored[name])
        tensor.name = _PREFIX + name
    both.functions.extend(fused.functions)
    both.ir_version = max(unfused.ir_version, fused.ir_version)
    own = {opset.domain for opset in unfused.opset_import}
    both.opset_import.extend(opset for opset in fused.opset_import if opset.domain not in own)
    typed = (*unfused.graph.value_info, *unfused.graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in typed}
    del both.graph.output[:]
    for name in compared:
        for each in (name, _PREFIX + name):
            both.graph.output.append(onnx.helper.make_tensor_value_info(each, types.get(name, _FLOAT), None))
    return both, compared


def excess_of(reference: Array, candidate: Array, typical: float = 5e-6) -> float:
    """Return the largest error of a slice, in units of the error that fp32 noise allows it; above 1 is a fault.

    A slice is an index along an axis. Its error is judged by its own magnitude, so that no large value elsewhere hides
    it, and, by the factor ``typical``, by the median magnitude of the slices along the axis. Infinities must be equal.
    Elements that are NaN in the reference are not judged.
    """
    if reference.size != candidate.size:
        return math.inf
    if not reference.size:
        return 0.0
    wide, other = reference.astype(np.float64), candidate.astype(np.float64).reshape(reference.shape)
    finite, infinite = np.isfinite(wide), np.isinf(wide)  # NaN is neither
    if not np.array_equal(wide[infinite], other[infinite]) or not np.isfinite(other[finite]).all():
        return math.inf
    wide, other = np.where(finite, wide, 0.0), np.where(finite, other, 0.0)
    squares, errors, axes = wide**2, (other - wide) ** 2, range(wide.ndim)
    found = 0.0
    for axis in axes:
        others = tuple(each for each in axes if each != axis)
        own, error = (np.sqrt(np.atleast_1d(each.mean(axis=others))) for each in (squares, errors))
        live = np.sort(own[own > 0])
        median = live[(live.size - 1) // 2] if live.size else 0.0  # the lower one of two: of the slice not large
        allowed = np.maximum(_OWN * own + typical * median, _SMALLEST)
        found = max(found, float((error / allowed).max(initial=0.0)))
    return found


def _open(model: onnx.ModelProto, inputs: Sequence[TensorSpec], outputs: Sequence[str], directory: Path) -> OnnxRuntime:
    dtypes = {value.name: BY_ONNX[value.type.tensor_type.elem_type].name for value in model.graph.output}
    specs = [TensorSpec(name, dtypes[name], ()) for name in outputs]
    return OnnxRuntime(model.SerializeToString(), inputs, specs, base_dir=directory, name="the graph of fusions")


def _runs(model: onnx.ModelProto, inputs: Sequence[TensorSpec], feed: Feeds, directory: Path) -> bool:
    """Whether the unfused graph runs on ``feed``."""
    try:
        _open(model, inputs, [value.name for value in model.graph.output], directory).run(feed)
    except RuntimeFailure:
        return False
    return True


def _blamed(fusions: Sequence[Fusion], error: RuntimeFailure) -> dict[str, str]:
    """Return the fusions whose nodes ONNX Runtime names in ``error``; all of them if it names none."""
    text = str(error.__cause__ or error)
    named = [fusion for fusion in fusions if f"{_PREFIX}{fusion.node}'" in text]
    return {fusion.anchor: f"it does not run: {error}" for fusion in named or fusions}


def variants(inputs: Sequence[TensorSpec], feeds: Sequence[Feeds]) -> Iterator[Feeds]:
    """Yield some of ``feeds``, then the largest with other masks, then it with dimensions cut to odd sizes and to 1.

    An input of integers or booleans whose values are 0 and 1 only is taken for a mask. Masks are drawn at random, then
    hide what is on the left, on the right, and all. Sizes are cut by the names of ``inputs``. The model may refuse a
    variant.
    """
    yield from feeds[:_SAMPLES]
    if not feeds:
        return
    largest = max(feeds, key=lambda feed: sum(array.size for array in feed.values()))
    masks = [name for name in largest if all(_is_mask(feed[name]) for feed in feeds)]
    drawn = np.random.default_rng(_SEED)
    cut = [_cut(inputs, largest, sizes) for sizes in _cuts(inputs, largest)]
    for feed in [largest, *cut[:1]] if masks else []:
        yield feed | {name: drawn.integers(0, 2, feed[name].shape).astype(feed[name].dtype) for name in masks}
        for hidden in (lambda n: slice(0, n // 2), lambda n: slice(n - n // 2, n), lambda n: slice(0, n)):
            changed = {name: np.ones_like(feed[name]) for name in masks}
            for array in changed.values():
                array[..., hidden(array.shape[-1])] = 0
            yield feed | changed
    yield from cut


def _is_mask(array: Array) -> bool:
    return array.ndim > 0 and array.dtype.kind in "biu" and bool(np.isin(array, (0, 1)).all())


def _cuts(inputs: Sequence[TensorSpec], feed: Feeds) -> Iterator[dict[str, int]]:
    """Yield odd sizes of all free dimensions of ``feed``, then 1 for each of them."""
    pairs = [(dim, size) for spec in inputs for dim, size in zip(spec.shape, feed[spec.name].shape, strict=True)]
    sizes = {dim: size for dim, size in pairs if isinstance(dim, str)}
    odd = {dim: size - 1 - size % 2 for dim, size in sizes.items() if size > 2}
    yield from [odd] if odd else []
    yield from ({dim: 1} for dim, size in sizes.items() if size > 1)


def _cut(inputs: Sequence[TensorSpec], feed: Feeds, sizes: Mapping[str, int]) -> Feeds:
    return {
        spec.name: feed[spec.name][tuple(slice(sizes.get(dim) if isinstance(dim, str) else None) for dim in spec.shape)]
        for spec in inputs
    }
