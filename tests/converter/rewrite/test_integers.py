"""Constant integers are computed, and nothing else."""

import numpy as np
import onnx_ir as ir

import graphs
from bf16kit.converter.graph.types import infer_types, run
from bf16kit.converter.rewrite.integers import compute_integers


def test_an_exporters_padding_becomes_numbers() -> None:
    text = """(float[2, 3] x) => (float[a, b] y, int64[c] kept) {
        zeros = ConstantOfShape <value = int64[1] {0}> (one)
        all = Concat <axis = 0> (some, zeros)
        rows = Reshape (all, turned)
        columns = Transpose (rows)
        pads = Reshape (columns, four)
        y = Pad (x, pads)
        kept = Concat <axis = 0> (one, four)
    }"""
    numbers = {"four": [4], "turned": [2, 2], "some": [1, 0, 2], "one": [1]}
    source = graphs.parsed(text, **{name: np.array(value) for name, value in numbers.items()})
    model = run([infer_types, compute_integers], ir.from_proto(source))
    assert [node.op_type for node in model.graph] == ["Pad", "Concat"]
    pads = model.graph.initializers["pads"].const_value
    assert pads is not None
    assert np.array_equal(pads.numpy(), [1, 2, 0, 0])
    assert [value.name for value in model.graph.outputs] == ["y", "kept"]


def test_what_is_fed_many_or_no_integers_stays() -> None:
    text = """(int64[2] x) => (int64[a] y, float[b] z) {
        large = ConstantOfShape <value = int64[1] {0}> (many)
        both = Concat <axis = 0> (x, one)
        y = Concat <axis = 0> (large, both)
        twice = Concat <axis = 0> (half, half)
        z = Identity (twice)
    }"""
    source = graphs.parsed(text, many=np.array([65]), one=np.array([1]), half=np.array([0.5], np.float32))
    model = run([infer_types, compute_integers], ir.from_proto(source))
    assert [node.op_type for node in model.graph] == ["ConstantOfShape", "Concat", "Concat", "Concat", "Identity"]


def test_results_too_large_to_compute_and_nodes_that_cannot_run_stay() -> None:
    """The nodes of the first line would take 32 TB; the others are nodes that ONNX Runtime refuses."""
    text = """(int64[2] x) => (int64[a] y) {
        zeros = ConstantOfShape <value = int64[1] {0}> (huge) all = Expand (one, huge) twice = Tile (one, huge)
        beyond = Gather (one, huge) other = Reshape (one, two) none = ConstantOfShape (less)
        y = Concat <axis = 0> (zeros, all, twice, beyond, other, none, x)
    }"""
    numbers = {"huge": [4_000_000_000_000], "one": [1], "two": [2], "less": [-1]}
    source = graphs.parsed(text, **{name: np.array(value) for name, value in numbers.items()})
    model = run([compute_integers], ir.from_proto(source))
    assert len(model.graph) == 7
