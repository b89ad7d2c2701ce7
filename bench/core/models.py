"""The models that are measured: MiniLM as its package ships it, and a 16→16 MLP made here."""

from __future__ import annotations

import sys
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


def minilm_feeds(rows: int, tokens: int = TOKENS) -> dict[str, NDArray[Any]]:
    """Random word pieces, int64 ``[rows, tokens]``, nothing masked: timing does not depend on what they say."""
    generator, shape = np.random.default_rng(0), (rows, tokens)
    return {
        "input_ids": generator.integers(_VOCABULARY.start, _VOCABULARY.stop, shape),
        "attention_mask": np.ones(shape, np.int64),
        "token_type_ids": np.zeros(shape, np.int64),
    }


def write_mlp(file: Path) -> Path:
    """An fp32 ONNX file of the 16→64→16 MLP, ``relu(x·W+b)·V+c``, ``x`` float32 ``[batch, 16]`` → ``y`` of the same."""
    generator, tensors = np.random.default_rng(0), []
    for layer, (wide, narrow) in enumerate(((MLP_WIDTH, MLP_HIDDEN), (MLP_HIDDEN, MLP_WIDTH))):
        weight = generator.standard_normal((wide, narrow), np.float32) * np.float32(wide**-0.5)
        bias = generator.standard_normal(narrow, np.float32)
        tensors += [numpy_helper.from_array(weight, f"weight{layer}"), numpy_helper.from_array(bias, f"bias{layer}")]
    nodes = [
        helper.make_node("Gemm", ["x", "weight0", "bias0"], ["linear0"], "gemm0"),
        helper.make_node("Relu", ["linear0"], ["hidden0"], "relu0"),
        helper.make_node("Gemm", ["hidden0", "weight1", "bias1"], ["y"], "gemm1"),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", MLP_WIDTH]) for name in "xy")
    graph = helper.make_graph(nodes, "mlp", [x], [y], tensors)
    # An opset that all servers know.
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), file)
    return file


def mlp_feeds(rows: int, width: int = MLP_WIDTH) -> dict[str, NDArray[Any]]:
    """Gaussian float32 ``[rows, width]``."""
    return {"x": np.random.default_rng(0).standard_normal((rows, width), np.float32)}
