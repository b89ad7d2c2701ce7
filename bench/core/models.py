"""The models that are measured: MiniLM as its package ships it, and a 16→16 MLP made here."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "deploy" / "demo"
MLP_WIDTH = 16
MLP_HIDDEN = 64
TOKENS = 16  # per request, where MiniLM's throughput is measured
_VOCABULARY = range(1000, 30000)  # MiniLM's word pieces, without the special and unused tokens below them


def demo_on_path() -> Path:
    """Make the scripts of ``deploy/demo`` importable: MiniLM's checkpoint, tokens and sentences are the demo's."""
    if str(DEMO) not in sys.path:
        sys.path.insert(0, str(DEMO))
    return DEMO


def minilm_feeds(rows: int, tokens: int = TOKENS, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Random word pieces, int64 ``[rows, tokens]``, nothing masked: timing does not depend on what they say."""
    generator = np.random.default_rng(seed)
    shape = (rows, tokens)
    return {
        "input_ids": generator.integers(_VOCABULARY.start, _VOCABULARY.stop, shape),
        "attention_mask": np.ones(shape, np.int64),
        "token_type_ids": np.zeros(shape, np.int64),
    }


def write_mlp(file: Path, *sizes: int) -> Path:
    """An fp32 ONNX file of ``relu(x·W+b)`` layers, ``x`` float32 ``[batch, sizes[0]]`` → ``y`` ``[batch, sizes[-1]]``.

    Without ``sizes`` it is the 16→64→16 MLP of the latency benchmark.
    """
    widths = sizes or (MLP_WIDTH, MLP_HIDDEN, MLP_WIDTH)
    generator = np.random.default_rng(0)
    nodes, initializers, value = [], [], "x"
    for layer, (wide, narrow) in enumerate(pairwise(widths)):
        weight = generator.standard_normal((wide, narrow), np.float32) * np.float32(wide**-0.5)
        bias = generator.standard_normal(narrow, np.float32)
        initializers += [
            numpy_helper.from_array(weight, f"weight{layer}"),
            numpy_helper.from_array(bias, f"bias{layer}"),
        ]
        last = layer == len(widths) - 2
        linear = "y" if last else f"linear{layer}"
        nodes.append(helper.make_node("Gemm", [value, f"weight{layer}", f"bias{layer}"], [linear], f"gemm{layer}"))
        if not last:
            value = f"hidden{layer}"
            nodes.append(helper.make_node("Relu", [linear], [value], f"relu{layer}"))
    edges = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])
        for name, width in (("x", widths[0]), ("y", widths[-1]))
    ]
    graph = helper.make_graph(nodes, "mlp", edges[:1], edges[1:], initializers)
    return save(graph, file)


def save(graph: onnx.GraphProto, file: Path) -> Path:
    """``graph`` as an ONNX model of an opset that all servers know, in ``file``."""
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), file)
    return file


def mlp_feeds(rows: int, width: int = MLP_WIDTH) -> dict[str, NDArray[Any]]:
    """Gaussian float32 ``[rows, width]``."""
    return {"x": np.random.default_rng(0).standard_normal((rows, width), np.float32)}
