"""Run by the release that is asked: makes a session of a graph on CUDA, whose log says where it put each node."""

from __future__ import annotations

import sys

import onnxruntime


def main(graph: str) -> None:
    """The graph is optimised as a server has it done. Ends the process with what ONNX Runtime says where it refuses."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 0
    onnxruntime.InferenceSession(graph, options, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])


if __name__ == "__main__":
    main(sys.argv[1])
