"""Times an LSTM and a GRU of 50 steps in the kernel, in fp32 and in bf16, beside ONNX Runtime's own in fp32.

python -m bench.kernel.recurrent [--seconds 0.5]: prints medians in ms of runs that take turns, for 1 and 2 threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from bf16kit.converter.fuse.fuse import fuse
from bf16kit.converter.write.graphs import Narrow
from bf16kit.runtime.ort.kernel import LIBRARY

STEPS = 50


def model(op: str, hidden: int, narrow: bool, rounds: bool) -> bytes:
    """Return the layer ``op`` of ``hidden`` inputs and units; with ``narrow`` for the kernel, from bf16 weights."""
    rows, drawn = hidden * (4 if op == "LSTM" else 3), np.random.default_rng(0)
    tensors = {name: drawn.standard_normal((1, rows, hidden), np.float32) / hidden**0.5 for name in "wr"}
    reset: dict[str, Any] = {"linear_before_reset": 1} if op == "GRU" else {}
    node = helper.make_node(op, ["x", "w", "r"], ["y"], name="layer", hidden_size=hidden, **reset)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [STEPS, "b", hidden])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [STEPS, 1, "b", hidden])
    own = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = helper.make_graph([node], "layer", [x], [y], own)
    made = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
    if narrow:
        made, _ = fuse(made, {"w", "r"}, rounding={"layer"} if rounds else ())
        Narrow({"w", "r"}, ()).apply(made)
        for name, array in tensors.items():
            made.graph.initializers[name].const_value = ir.tensor(array.astype(ml_dtypes.bfloat16), name=name)
    return ir.to_proto(made).SerializeToString()


def session(data: bytes, threads: int) -> ort.InferenceSession:
    """Return a session of ``data`` with the kernel registered."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(LIBRARY))
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def medians(sessions: list[ort.InferenceSession], feed: dict[str, Any], seconds: float) -> list[float]:
    """Return each session's median time of a run in ms."""
    times: list[list[float]] = [[] for _ in sessions]
    end = time.perf_counter() + seconds * len(sessions)
    while time.perf_counter() < end or len(times[0]) < 3:
        for mine, each in zip(times, sessions, strict=True):
            start = time.perf_counter()
            each.run(None, feed)
            mine.append(1000 * (time.perf_counter() - start))
    return [statistics.median(mine[1:]) for mine in times]


def main() -> None:
    """Print a line for each layer, number of threads, batch and width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5)
    seconds = parser.parse_args().seconds
    print("layer threads batch hidden: ONNX Runtime fp32; kernel fp32, bf16 (ms; × faster)")
    for op in ("LSTM", "GRU"):
        for hidden in (32, 128, 512, 1024):
            models = [
                model(op, hidden, narrow, rounds) for narrow, rounds in ((False, False), (True, False), (True, True))
            ]
            for threads in (1, 2):
                sessions = [session(data, threads) for data in models]
                for batch in (1, 8, 32):
                    x = np.random.default_rng(1).standard_normal((STEPS, batch, hidden), np.float32)
                    theirs, *ours = medians(sessions, {"x": x}, seconds)
                    shown = ", ".join(f"{each:.2f} ({theirs / each:.2f})" for each in ours)
                    print(f"{op} {threads} {batch} {hidden}: {theirs:.2f}; {shown}", flush=True)


if __name__ == "__main__":
    main()
