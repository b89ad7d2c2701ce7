"""The part of aarch64.sh in Python: converts small models here, and loads them in the emulated processor.

``convert DIRECTORY`` writes DIRECTORY/mlp, cnn and lstm. ``load PROCESSOR DIRECTORY…`` loads each artifact in the
profiles ``cpu`` and ``cpu-bf16``: this raises an error if golden samples differ by more than the artifact's budget
from what was certified, and exits with status 1 if the kernel runs another path than the processor's fastest.
"""

from __future__ import annotations

import platform
import sys
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


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(Path(sys.argv[2]))
    else:
        load(sys.argv[2], sys.argv[3:])
