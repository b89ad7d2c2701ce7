"""The part of aarch64.sh in Python: converts small models here, and loads them in the emulated processor.

``convert DIRECTORY`` writes DIRECTORY/mlp, cnn and lstm. ``load PROCESSOR DIRECTORY…`` loads each artifact in the
profiles ``cpu`` and ``cpu-bf16``: this raises an error if golden samples differ by more than the artifact's budget
from what was certified, and exits with status 1 if the kernel runs another path than the processor's fastest.
``ask ADDRESS DIRECTORY`` sends a server one request, and compares the result with what the artifact computes here.
"""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

import click

_PATHS = {"neoverse-n1": {"neon"}}  # without bf16 instructions; all others also have neon_bf16


def convert(target: Path) -> None:
    """Convert three small models, each to DIRECTORY/NAME/1."""
    import numpy as np
    import torch
    from torch import nn

    import bf16kit

    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(32, 48, batch_first=True), nn.Linear(48, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.layer(x)[0][:, -1])
            return result

    torch.manual_seed(0)
    head = nn.Linear(64 * 14 * 14, 10)
    models = {
        "mlp": (nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)), (4, 256)),
        "cnn": (
            nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 1), nn.Flatten(), head),
            (2, 3, 16, 16),
        ),
        "lstm": (Lstm(), (2, 12, 32)),
    }
    for name, (model, shape) in models.items():
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        bf16kit.convert(model.eval(), out=target / name / "1", samples=[x])
        click.echo(f"converted {name}")


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


def ask(address: str, directory: Path) -> None:
    """Ask the server for what the artifact computes here, in bf16 by bf16kit's kernel: all bits must be equal."""
    import numpy as np
    from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import InferenceServerException

    import bf16kit

    here = bf16kit.load(directory, profile="cpu-bf16")
    x = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
    (name, expected), *_ = here(x).items()
    client, began = InferenceServerClient(address), time.monotonic()
    while True:
        try:
            if client.is_model_ready("mlp"):
                break
        except InferenceServerException:
            pass  # not yet listening
        if time.monotonic() - began > 300:
            sys.exit(f"no model is ready at {address} after 300 s")
        time.sleep(1)
    feed = InferInput(here.inputs[0].name, list(x.shape), "FP32")
    feed.set_data_from_numpy(x)
    found = client.infer("mlp", [feed], outputs=[InferRequestedOutput(name)]).as_numpy(name)
    if not np.array_equal(found, expected):
        sys.exit(f"the served result differs from {here.info.kernel}'s here by up to {np.abs(found - expected).max()}")
    click.echo(f"a request over gRPC: the emulated server's bits equal {here.info.kernel}'s here")


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(Path(sys.argv[2]))
    elif sys.argv[1] == "ask":
        ask(sys.argv[2], Path(sys.argv[3]))
    else:
        load(sys.argv[2], sys.argv[3:])
