"""Where benchmarks keep what they convert: each artifact is made once, through the command line users have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.core import models

BOTH_FORMATS = ("--format", "onnx", "--format", "torchscript")


def program(name: str) -> str:
    """An entry point of this environment, e.g. ``bf16-convert``, or of the one that this is laid over."""
    own = Path(sys.executable).with_name(name)
    under = (Path(path).parents[2] / "bin" / name for path in sys.path if path.endswith("site-packages"))
    return str(next((found for found in (own, *under) if found.exists()), own))


class Workspace:
    """Artifacts under ``root``, converted when first asked for and kept for the benchmarks that follow."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def minilm(self, *flags: str, name: str = "minilm") -> Path:
        """MiniLM, converted as ``make demo`` converts it, with real sentences as calibration samples."""
        models.demo_on_path()
        import minilm

        return self.converted(name, minilm.checkpoint(), "--samples", "minilm:calibration", *flags)

    def mlp(self) -> Path:
        """The 16→16 MLP, in profiles that servers of older commits know as well."""
        self.root.mkdir(parents=True, exist_ok=True)
        profiles = ("--profile", "cpu", "--profile", "cuda")
        return self.converted("mlp", models.write_mlp(self.root / "mlp.onnx"), *profiles)

    def converted(self, name: str, source: Path, *flags: str) -> Path:
        """The artifact ``name`` of ``source``, made by ``bf16-convert`` with ``flags`` when first asked for."""
        artifact = self.root / "artifacts" / name / "1"
        if not artifact.exists():
            artifact.parent.mkdir(parents=True, exist_ok=True)
            convert(source, artifact, *flags)
        return artifact

    def repository(self, name: str, artifact: Path, serving: str = "") -> Path:
        """A fresh model repository ``root/name`` of ``artifact`` alone, with ``serving`` as its serving.yaml."""
        repository = self.root / name
        shutil.rmtree(repository, ignore_errors=True)
        model = repository / artifact.parent.name
        shutil.copytree(artifact, model / artifact.name, copy_function=os.link)
        if serving:
            (model / "serving.yaml").write_text(serving, "utf-8")
        return repository


def convert(source: Path, artifact: Path, *flags: str) -> None:
    """Run ``bf16-convert checkpoint``, with the demo's samples importable; what it says is shown when it fails."""
    command = [program("bf16-convert"), "checkpoint", str(source), "--out", str(artifact), *flags]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(models.DEMO), str(models.ROOT)))}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"bf16-convert failed with exit code {done.returncode}:\n{done.stdout}")
