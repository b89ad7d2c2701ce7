"""Both programs with a real artifact between them: bf16-serve serves the artifact that bf16-convert wrote."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper, numpy_helper
from waiting import until

WIDTH, CLASSES = 64, 10


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]]:
    """Return the path of an fp32 ONNX classifier, and the same function in numpy."""
    rng = np.random.default_rng(0)
    a = (rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
    b = (rng.standard_normal((WIDTH, CLASSES)) / WIDTH**0.5).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "b"], ["logits"]),
    ]
    edges = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH]),
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES]),
    ]
    weights = [numpy_helper.from_array(a, "a"), numpy_helper.from_array(b, "b")]
    graph = helper.make_graph(nodes, "classifier", edges[:1], edges[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = tmp_path / "classifier.onnx"
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(path)
    return path, lambda x: np.maximum(x @ a, 0) @ b


@pytest.mark.long
def test_a_converted_model_gives_its_sources_outputs_and_live_drift_is_measured(
    tmp_path: Path,
    source: tuple[Path, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]],
    serve: Callable[..., Any],
) -> None:
    path, fp32 = source
    repository = tmp_path / "models"
    convert = [str(Path(sys.executable).with_name("bf16-convert")), "checkpoint", str(path)]
    subprocess.run([*convert, "--out", str(repository / "classifier" / "1")], check=True, capture_output=True)
    (repository / "classifier" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 100}\n")

    server = serve("--repository", str(repository), "--device", "cpu").wait_ready()
    assert "golden samples within budget" in server.log
    x = np.random.default_rng(1).standard_normal((6, WIDTH)).astype(np.float32)
    with triton.InferenceServerClient(server.target) as client:
        tensor = triton.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        answer = client.infer("classifier", [tensor]).as_numpy("logits")
    drift = np.linalg.norm(answer - fp32(x)) / np.linalg.norm(fp32(x))
    assert 0 < drift < 1e-2

    labels = 'model="classifier",output="logits",version="1"'
    until(lambda: server.metric(f"bf16kit_drift_relative_l2_count{{{labels}}}") == 6, 60, "six samples measured")
    live = server.metric(f"bf16kit_drift_relative_l2_sum{{{labels}}}") / 6
    assert live == pytest.approx(drift, rel=0.5)
    assert server.metric(f'bf16kit_drift_baseline{{metric="relative_l2",{labels}}}') > 0
