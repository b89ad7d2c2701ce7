"""Runs MLServer with models that return their inputs: ``python mlserver_models.py DIRECTORY PORT``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ECHO = '''
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Echo(MLModel):
    """Every input under the name of an output, read and written by MLServer's own codecs as its guide has it."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = {tensor.name: tensor for tensor in payload.inputs}
        wanted = {output.name for output in payload.outputs or []}
        outputs = [self.answer(given[spec.name]) for spec in self.inputs]
        return InferenceResponse(
            id=payload.id, model_name=self.name, model_version=self.version,
            outputs=[output for output in outputs if not wanted or output.name in wanted],
        )

    def answer(self, tensor):
        name = tensor.name.replace("in_", "out_")
        if tensor.datatype == "BYTES":
            return ResponseOutput(name=name, datatype="BYTES", shape=tensor.shape, data=tensor.data)
        return NumpyCodec.encode_output(name, NumpyCodec.decode_input(tensor))
'''
TYPED = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64", "BYTES")
MODELS = {"identity": ("FP32",), "typed": TYPED, "half": ("FP16",)}


def main(directory: str, port: str) -> None:
    """Write the models and replace this process by MLServer."""
    root = Path(directory)
    for name, datatypes in MODELS.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        settings = {
            "name": name,
            "implementation": "echo.Echo",
            "parameters": {"version": "1"},
            "inputs": [{"name": f"in_{d.lower()}", "datatype": d, "shape": [-1, 4]} for d in datatypes],
            "outputs": [{"name": f"out_{d.lower()}", "datatype": d, "shape": [-1, 4]} for d in datatypes],
        }
        (root / name / "model-settings.json").write_text(json.dumps(settings))
    (root / "echo.py").write_text(ECHO)
    ports = {"host": "127.0.0.1", "grpc_port": int(port), "http_port": int(port) + 1, "metrics_port": int(port) + 2}
    (root / "settings.json").write_text(json.dumps({**ports, "parallel_workers": 0}))
    os.environ["PYTHONPATH"] = str(root)
    program = str(Path(sys.executable).with_name("mlserver"))
    os.execv(program, [program, "start", str(root)])  # noqa: S606 -- no shell is wanted


if __name__ == "__main__":
    main(*sys.argv[1:])
