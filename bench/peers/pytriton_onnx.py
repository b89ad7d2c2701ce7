"""An ONNX file in PyTriton: ``pytriton_onnx.py FILE NAME GRPC_PORT HTTP_PORT METRICS_PORT JSON``.

Runs in PyTriton's own environment, so it imports nothing of this project. JSON: ``instances`` of the function,
``threads`` of one run (absent: ONNX Runtime's defaults).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import onnxruntime
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

_NUMPY = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


def main(file: str, name: str, grpc_port: int, http_port: int, metrics_port: int, how: dict[str, Any]) -> None:
    """Serve until the process is told to end."""
    options = onnxruntime.SessionOptions()
    if how.get("threads") is not None:
        options.intra_op_num_threads = how["threads"]
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]

    @batch  # type: ignore[untyped-decorator]
    def infer(**feeds: Any) -> dict[str, Any]:
        return dict(zip(outputs, session.run(None, feeds), strict=True))

    def tensors(values: Any) -> list[Tensor]:
        shapes = (tuple(dim if isinstance(dim, int) else -1 for dim in value.shape[1:]) for value in values)
        return [Tensor(name=v.name, dtype=_NUMPY[v.type], shape=s) for v, s in zip(values, shapes, strict=True)]

    config = TritonConfig(grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port, log_verbose=0)
    model = ModelConfig(max_batch_size=32, batcher=DynamicBatcher(max_queue_delay_microseconds=0))
    with Triton(config=config) as triton:
        functions = [infer] * how.get("instances", 1)
        triton.bind(
            model_name=name,
            infer_func=functions if len(functions) > 1 else infer,
            inputs=tensors(session.get_inputs()),
            outputs=tensors(session.get_outputs()),
            config=model,
        )
        triton.serve()


if __name__ == "__main__":
    file, name, grpc_port, http_port, metrics_port, how = sys.argv[1:]
    main(file, name, int(grpc_port), int(http_port), int(metrics_port), json.loads(how))
