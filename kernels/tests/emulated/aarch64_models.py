"""The part of aarch64.sh in Python: converts small models here, and loads them in the emulated processor.

``convert DIRECTORY`` writes DIRECTORY/mlp, cnn, lstm, gru and minilm (the demo's model), and exits with status 1 unless
their graphs have the kernel's nodes that they are to test. ``load PROCESSOR DIRECTORY…`` loads each artifact in the
profiles ``cpu`` and ``cpu-bf16``: this raises an error if golden samples differ by more than the artifact's budget from
what was certified, and exits with status 1 if the kernel runs another path than the processor's fastest. ``ask ADDRESS
DIRECTORY…`` sends a server one request to each model, and compares the results with what the artifacts compute here.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

_PATHS = {"neoverse-n1": {"neon"}}  # without bf16 instructions; all others also have neon_bf16
# Each model's input, and the kernel's nodes. Only of minilm does ONNX Runtime compute what it rounds otherwise on Arm:
# the first LayerNormalization. Where that moves a value across a boundary of bf16, later results differ more.
_MODELS = {
    "mlp": ((4, 256), {"MatMulBf16"}),
    "cnn": ((2, 32, 16, 16), {"ConvBf16", "ConvBlockBf16", "MatMulBf16"}),
    "lstm": ((2, 12, 32), {"LSTMBf16", "MatMulBf16"}),
    "gru": ((2, 12, 32), {"GRUBf16", "MatMulBf16"}),
    "minilm": ((1, 16), {"MatMulBf16", "MatMul3Bf16", "AttentionBf16", "AddLayerNorm"}),
}


def convert(target: Path) -> None:
    """Convert the models, each to DIRECTORY/NAME/1."""
    import numpy as np
    import onnx
    import torch
    from torch import nn

    import bf16kit
    from bf16kit.runtime.ort.kernel import DOMAIN

    class Recurrent(nn.Module):
        def __init__(self, layer: nn.RNNBase) -> None:
            super().__init__()
            self.layer, self.head = layer, nn.Linear(256, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.layer(x)[0][:, -1])
            return result

    torch.manual_seed(0)
    bottleneck = (
        *(nn.Conv2d(64, 192, 1), nn.ReLU6(), nn.Conv2d(192, 192, 3, 2, 1, groups=192), nn.ReLU6()),
        nn.Conv2d(192, 48, 1),
    )
    models = {
        "mlp": nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)),
        "cnn": nn.Sequential(
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
            *(*bottleneck, nn.Flatten(), nn.Linear(48 * 8 * 8, 20)),
        ),
        "lstm": Recurrent(nn.LSTM(32, 256, batch_first=True)),
        "gru": Recurrent(nn.GRU(32, 256, batch_first=True)),
    }
    for name, model in models.items():
        x = np.random.default_rng(0).standard_normal(_MODELS[name][0]).astype(np.float32)
        bf16kit.convert(model.eval(), out=target / name / "1", samples=[x])
    subprocess.run([sys.executable, "deploy/demo/publish.py", target], check=True)
    for name, (_, wanted) in _MODELS.items():
        graph = onnx.load(target / name / "1" / "cpu-bf16.onnx", load_external_data=False).graph
        found = {node.op_type.partition("_")[0] for node in graph.node if node.domain == DOMAIN}
        if found != wanted:
            sys.exit(f"{name}: the kernel's nodes are {sorted(found)}, not {sorted(wanted)}")
        click.echo(f"converted {name}: {', '.join(sorted(found))}")


def load(processor: str, directories: list[str]) -> None:
    """Load each artifact in each profile."""
    import bf16kit

    seen = set()
    for directory in directories:
        for profile in ("cpu", "cpu-bf16"):
            info = bf16kit.load(Path(directory, "1"), profile=profile).info
            where = f"{processor} ({platform.machine()}): {Path(directory).name}, {profile}"
            click.echo(f"{where}: golden samples within budget, kernel {info.kernel or 'none'}")
            seen.add(info.kernel)
    if seen - {""} != _PATHS.get(processor, {"neon", "neon_bf16"}):
        sys.exit(f"{processor}: the kernel ran the paths {sorted(seen)}")


def ask(address: str, directories: list[str]) -> None:
    """Ask the server for what each artifact computes here in cpu-bf16: all bits must be equal, minilm within budget."""
    import numpy as np
    from tritonclient.grpc import InferenceServerClient, InferInput
    from tritonclient.utils import np_to_triton_dtype

    import bf16kit

    client = InferenceServerClient(address)
    for directory in directories:
        model = Path(directory).name
        here = bf16kit.load(Path(directory, "1"), profile="cpu-bf16")
        feeds = _request(model, here.inputs[0].name)
        _wait(client, model)
        tensors = [InferInput(name, x.shape, np_to_triton_dtype(x.dtype)) for name, x in feeds.items()]
        for tensor, x in zip(tensors, feeds.values(), strict=True):
            tensor.set_data_from_numpy(x)
        reply = client.infer(model, tensors)
        served = {spec.name: reply.as_numpy(spec.name) for spec in here.outputs}
        drift = bf16kit.compare(here, lambda *_, served=served: served, [feeds])
        equal = all(np.array_equal(served[name], values) for name, values in here(feeds).items())
        if not (equal or (model == "minilm" and drift.within)):
            sys.exit(f"{model}: the served result differs from {here.info.kernel}'s here: {drift}")
        agree = "bits equal" if equal else "results are within budget of"
        click.echo(f"a request over gRPC to {model}: the emulated server's {agree} {here.info.kernel}'s here")


def _request(model: str, first: str) -> dict[str, Any]:
    import numpy as np

    random, shape = np.random.default_rng(1), _MODELS[model][0]
    if model != "minilm":
        return {first: random.standard_normal(shape).astype(np.float32)}
    words = random.integers(1000, 30000, shape)
    return {"input_ids": words, "attention_mask": np.ones_like(words), "token_type_ids": np.zeros_like(words)}


def _wait(client: Any, model: str) -> None:
    from tritonclient.utils import InferenceServerException

    began = time.monotonic()
    while time.monotonic() - began < 300:
        try:
            if client.is_model_ready(model):
                return
        except InferenceServerException:
            pass  # not yet listening
        time.sleep(1)
    sys.exit(f"{model} is not ready after 300 s")


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(Path(sys.argv[2]))
    elif sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3:])
    else:
        load(sys.argv[2], sys.argv[3:])
