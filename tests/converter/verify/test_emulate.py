"""The emulation of each operator on a CPU gives what torch computes in bf16, so that it cannot be wrong unseen.

torch computes most operators in fp32 and rounds once, as CUDA's kernels do. A result may be the neighbouring bf16 value
where fp32 values lie next to the middle of two: sums are added in another order, and exp, tanh, erf and the like differ
in their last fp32 bits. Attention is compared with torch's fp32 result, rounded once: in bf16 torch rounds within it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch.nn import functional

from bf16kit.converter.graph.cuda_kernels import PLANNED
from bf16kit.converter.graph.operators import EXACT
from bf16kit.converter.verify import running
from bf16kit.runtime.ort.session import open_session

Array = NDArray[Any]
Torch = Callable[..., torch.Tensor]

MOST_NEIGHBOURS = 0.02  # of the results, where sums and functions may differ in fp32
_RANDOM = np.random.default_rng(0)


def _bf16(*shape: int, low: float = -3.0, high: float = 3.0) -> Array:
    return _RANDOM.uniform(low, high, shape).astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """One operator: ``compute`` is what torch computes of its bf16 inputs, which other ``inputs`` follow.

    ``exact`` says that the fp32 result has only one value, so that all bf16 results must be equal. ``other`` are inputs
    that are not floats, None for one that is left out. ``unread`` are outputs that older ONNX Runtimes demand.
    """

    compute: Torch
    inputs: tuple[Array, ...]
    exact: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    other: tuple[Array | None, ...] = ()
    unread: tuple[str, ...] = ()


def _in_fp32(compute: Torch) -> Torch:
    return lambda *given: compute(*(tensor.float() for tensor in given)).bfloat16()


def _heads(x: torch.Tensor, heads: int = 2) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    found = functional.scaled_dot_product_attention(_heads(q), _heads(k), _heads(v), is_causal=causal)
    return found.transpose(1, 2).flatten(2)


def _packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _attention(*(x @ weight + bias).chunk(3, -1))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    c, s = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    return torch.cat((a * c - b * s, a * s + b * c), -1).bfloat16()


_A, _B, _POSITIVE = _bf16(64, 64), _bf16(64, 64), _bf16(64, 64, low=0.1)
_IMAGE = _bf16(2, 4, 16, 16)
_SEQUENCE = tuple(_bf16(2, 9, 16) for _ in range(3))
CASES: dict[tuple[str, str], Case] = {
    ("", "Add"): Case(torch.add, (_A, _B), exact=True),
    ("", "Attention"): Case(_in_fp32(_attention), _SEQUENCE, attributes={"q_num_heads": 2, "kv_num_heads": 2}),
    ("", "AveragePool"): Case(
        lambda x: functional.avg_pool2d(x, 3), (_IMAGE,), attributes={"kernel_shape": [3, 3], "strides": [3, 3]}
    ),
    ("", "Conv"): Case(functional.conv2d, (_IMAGE, _bf16(8, 4, 3, 3), _bf16(8))),
    ("", "Cos"): Case(torch.cos, (_A,)),
    ("", "Div"): Case(torch.div, (_A, _POSITIVE), exact=True),
    ("", "Erf"): Case(torch.erf, (_A,)),
    ("", "Exp"): Case(torch.exp, (_A,)),
    ("", "Gelu"): Case(functional.gelu, (_A,)),
    ("", "Gemm"): Case(_in_fp32(lambda a, b, c: a @ b + c), (_A, _B, _bf16(64))),
    ("", "HardSigmoid"): Case(
        _in_fp32(lambda x: torch.clamp(0.2 * x + 0.5, 0, 1)), (_A,), attributes={"alpha": 0.2, "beta": 0.5}
    ),
    ("", "HardSwish"): Case(functional.hardswish, (_A,)),
    ("", "LayerNormalization"): Case(lambda x, w, b: functional.layer_norm(x, (64,), w, b), (_A, _bf16(64), _bf16(64))),
    ("", "MatMul"): Case(torch.matmul, (_A, _B)),
    ("", "Mul"): Case(torch.mul, (_A, _B), exact=True),
    ("", "Pow"): Case(torch.pow, (_POSITIVE, _bf16(64, 64))),
    ("", "RMSNormalization"): Case(lambda x, w: functional.rms_norm(x, (64,), w, 1e-5), (_A, _bf16(64))),
    ("", "ReduceMean"): Case(lambda x: x.mean(-1, keepdim=True), (_bf16(512, 64),), other=(np.array([-1]),)),
    ("", "ReduceSum"): Case(lambda x: x.sum(-1, keepdim=True), (_bf16(512, 64),), other=(np.array([-1]),)),
    ("", "RotaryEmbedding"): Case(_rotated, (_bf16(2, 2, 8, 16), _bf16(2, 8, 8), _bf16(2, 8, 8))),
    ("", "Sigmoid"): Case(torch.sigmoid, (_A,)),
    ("", "Sin"): Case(torch.sin, (_A,)),
    ("", "Softmax"): Case(lambda x: x.softmax(-1), (_A,)),
    ("", "Sqrt"): Case(torch.sqrt, (_POSITIVE,), exact=True),
    ("", "Sub"): Case(torch.sub, (_A, _B), exact=True),
    ("", "Sum"): Case(_in_fp32(lambda a, b, c: a + b + c), (_A, _B, _POSITIVE)),
    ("", "Tanh"): Case(torch.tanh, (_A,)),
    ("com.microsoft", "Attention"): Case(
        _in_fp32(_packed), (_bf16(2, 9, 16), _bf16(16, 48, low=-0.5, high=0.5), _bf16(48)), attributes={"num_heads": 2}
    ),
    # Sums stay above -3: far below zero, 1 + erf leaves few digits, and how many differs between processors.
    ("com.microsoft", "BiasGelu"): Case(
        _in_fp32(lambda x, b: functional.gelu(x + b)),
        (_bf16(64, 64, low=-1.5, high=1.5), _bf16(64, low=-1.5, high=1.5)),
    ),
    ("com.microsoft", "FastGelu"): Case(lambda x: functional.gelu(x, approximate="tanh"), (_A,)),
    ("com.microsoft", "FusedMatMul"): Case(_in_fp32(lambda a, b: 0.3 * (a @ b)), (_A, _B), attributes={"alpha": 0.3}),
    ("com.microsoft", "Gelu"): Case(functional.gelu, (_A,)),
    ("com.microsoft", "GroupQueryAttention"): Case(
        _in_fp32(lambda q, k, v: _attention(q, k, v, causal=True)),
        _SEQUENCE,
        attributes={"num_heads": 2, "kv_num_heads": 2},
        other=(None, None, np.full(2, 8, np.int32), np.array(9, np.int32)),
        unread=("keys", "values"),
    ),
    ("com.microsoft", "MultiHeadAttention"): Case(_in_fp32(_attention), _SEQUENCE, attributes={"num_heads": 2}),
    ("com.microsoft", "QuickGelu"): Case(
        _in_fp32(lambda x: x * torch.sigmoid(1.702 * x)), (_A,), attributes={"alpha": 1.702}
    ),
    ("com.microsoft", "SkipLayerNormalization"): Case(
        _in_fp32(lambda x, s, w, b: functional.layer_norm(x + s, (64,), w, b)),
        (_bf16(2, 32, 64), _bf16(2, 32, 64), _bf16(64), _bf16(64)),
        attributes={"epsilon": 1e-5},
    ),
}


def _emulated(directory: Path, domain: str, op: str, case: Case) -> Array:
    """Return the output of a graph of one bf16 node between casts, emulated as a conversion does it."""
    floats = [f"x{i}" for i in range(len(case.inputs))]
    names = [f"n{i}" for i in range(len(case.inputs))]
    others = ["" if each is None else f"i{i}" for i, each in enumerate(case.other)]
    nodes = [helper.make_node("Cast", [x], [n], to=TensorProto.BFLOAT16) for x, n in zip(floats, names, strict=True)]
    outputs = ["r", *case.unread]
    nodes.append(helper.make_node(op, [*names, *others], outputs, domain=domain, name="under_test", **case.attributes))
    nodes.append(helper.make_node("Cast", ["r"], ["y"], to=TensorProto.FLOAT))
    types = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, None) for name in (*names, "r")]
    edges = [
        helper.make_tensor_value_info(x, TensorProto.FLOAT, a.shape) for x, a in zip(floats, case.inputs, strict=True)
    ]
    held = [onnx.numpy_helper.from_array(a, name) for name, a in zip(others, case.other, strict=True) if a is not None]
    graph = helper.make_graph(
        nodes, "g", edges, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], held, value_info=types
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=11), directory / "cuda.onnx")
    session = open_session(running.emulation(directory / "cuda.onnx"))
    (found,) = session.run(["y"], dict(zip(floats, case.inputs, strict=True)))
    return np.asarray(found)


def _fault(found: Array, case: Case) -> str | None:
    """Return how ``found`` differs from torch's result; None if it does not."""
    with torch.no_grad():
        expected = case.compute(*(torch.from_numpy(x).bfloat16() for x in case.inputs)).float().numpy()
    assert expected.shape == found.shape
    bits = found.view(np.uint32)
    if np.any(bits & np.uint32(0xFFFF)):
        return f"{np.mean(bits & np.uint32(0xFFFF) != 0):.0%} of the results are no bf16 values"
    steps = np.abs(_ordered(found) - _ordered(expected))
    if steps.max() > (0 if case.exact else 1):
        return f"a result is {steps.max()} bf16 values away"
    different = float(np.mean(steps != 0))
    return f"{different:.1%} of the results differ" if different > MOST_NEIGHBOURS else None


def _ordered(values: Array) -> NDArray[np.int64]:
    """Number bf16 values in their order, both zeros alike."""
    bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.int64)
    return np.where(bits >> 15, -(bits & 0x7FFF), bits)


def test_every_operator_that_a_plan_may_narrow_is_compared() -> None:
    """TopK is left out, because it only chooses values."""
    planned = {(domain, op) for domain, ops in PLANNED.items() for op in ops if op not in EXACT}
    assert planned - {("", "Cast"), ("", "TopK")} == CASES.keys()


@pytest.mark.parametrize(("domain", "op"), CASES)
def test_an_operator_is_emulated_as_torch_computes_it_in_bf16(tmp_path: Path, domain: str, op: str) -> None:
    case = CASES[domain, op]
    assert _fault(_emulated(tmp_path, domain, op, case), case) is None


@pytest.mark.parametrize(("domain", "op"), CASES)
def test_an_operator_that_is_not_rounded_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domain: str, op: str
) -> None:
    case = CASES[domain, op]
    monkeypatch.setattr(running, "EXACT", EXACT | {op})
    assert _fault(_emulated(tmp_path, domain, op, case), case) is not None
