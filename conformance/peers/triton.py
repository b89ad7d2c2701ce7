"""Runs the Triton in PyTriton's wheel, with models of its Python backend: ``python triton.py DIRECTORY PORT``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytriton

ECHO = """
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])

    def execute(self, requests):
        return [pb_utils.InferenceResponse(list(self.outputs(request))) for request in requests]

    def outputs(self, request):
        for given, made in zip(self.config["input"], self.config["output"]):
            tensor = pb_utils.get_input_tensor_by_name(request, given["name"])
            if tensor is not None and made["name"] in request.requested_output_names():
                yield pb_utils.Tensor(made["name"], tensor.as_numpy())
"""
TYPED = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64", "STRING")
MODELS = {
    "identity": (("FP32",), 8, "version_policy: { all {} }\ndynamic_batching {}\n", ()),
    "kinds": ((*TYPED, "FP16"), 8, "", ()),
    "typed": (TYPED, 8, "", ()),
    "nobatch": (("FP32", "INT32"), 0, "", ()),
    "optional": (("FP32", "INT32"), 8, "", ("INT32",)),
}


def write(repository: Path) -> None:
    """Write the models above to ``repository``."""
    for name, (datatypes, batch, more, optional) in MODELS.items():
        for version in ("1", "3") if name == "identity" else ("1",):
            (repository / name / version).mkdir(parents=True, exist_ok=True)
            (repository / name / version / "model.py").write_text(ECHO)
        dims = "[ 4 ]" if batch else "[ -1, 4 ]"
        lines = [
            f'name: "{name}"\nbackend: "python"\nmax_batch_size: {batch}\ninstance_group {{ kind: KIND_CPU }}\n{more}'
        ]
        for datatype in datatypes:
            low, may = datatype.lower(), "optional: true" if datatype in optional else ""
            lines.append(f'input {{ name: "in_{low}" data_type: TYPE_{datatype} dims: {dims} {may} }}\n')
            lines.append(f'output {{ name: "out_{low}" data_type: TYPE_{datatype} dims: {dims} }}\n')
        (repository / name / "config.pbtxt").write_text("".join(lines))


def main(directory: str, port: str) -> None:
    """Write the models and replace this process by Triton."""
    repository = Path(directory)
    write(repository)
    package = Path(pytriton.__file__).parent
    server = package / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "backends" / "python" / "triton_python_backend_stub"
    if not stub.exists():  # PyTriton also copies it when it starts
        shutil.copy(server / "python_backend_stubs" / python / stub.name, stub)
    libraries = [package.parent / "nvidia_pytriton.libs", Path(sys.base_prefix) / "lib"]
    os.environ["LD_LIBRARY_PATH"] = ":".join([*map(str, libraries), os.environ.get("LD_LIBRARY_PATH", "")])
    os.environ["PYTHONPATH"] = str(package.parent)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = ("--allow-http=false", "--allow-metrics=false", "--model-control-mode=explicit", "--load-model=*")
    program = str(server / "bin" / "tritonserver")
    os.execv(program, [  # noqa: S606 -- no shell is wanted
        program, f"--model-repository={repository}", f"--backend-directory={server / 'backends'}",
        "--grpc-address=127.0.0.1", f"--grpc-port={port}", *options,
    ])  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
