"""Adds artifacts of the present schema version to this directory: ``python tests/artifacts/add.py [MODEL ...]``.

It converts the named :data:`MODELS`, by default all, with the ``bf16-convert`` of this checkout, except those that are
there, and records them in README.md and restored.sha256. Run it in a clean checkout, after the commit that raises the
version.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import sources
from safetensors.numpy import load_file

from bf16kit.artifact.manifest import SCHEMA_VERSION

HERE = Path(__file__).resolve().parent
MLP = "--model sources:Mlp --input x:float32:batch,24"
IMAGE = "--input image:float32:batch,3,8,8"
CNN = f"cnn.pt --model sources:Cnn {IMAGE}"
MAP = f"renamed.safetensors {MLP} --map rules.yaml"
#: Extend it by what a new version can hold. One report is enough.
MODELS = {
    "mlp": f"checkpoint mlp.pt {MLP} --format onnx --format torchscript",
    "convolutions": f"checkpoint convolutions.pt --model sources:Convolutions {IMAGE} --no-report",
    "transformer": "checkpoint transformer.pt --model sources:Transformer --input ids:int64:batch,seq --no-report",
    "lstm": "checkpoint lstm.onnx --budget relative_l2.p50=0.02 --no-report",
    "half": f"checkpoint half.safetensors {MLP} --no-report",
    "islands": f"checkpoint mlp.pt {MLP} --profile cpu --budget relative_l2=0.0012 --search --no-report",
    "kept": f"checkpoint mlp.pt {MLP} --keep-fp32 down.* --no-residual --no-report",
    "pt2": f"checkpoint mlp.pt {MLP} --format pt2 --no-report",
    "export": f"checkpoint {CNN} --format onnx --format safetensors --no-report",
    "mapped": f"checkpoint {MAP} --no-report",
    "recovered": f"recover mlp.pt {MLP} --data sources:batches --steps 10 --device cpu --no-report",
}


def main() -> None:
    """Convert what is not there yet; on the first failed conversion, end with its exit code."""
    models = sys.argv[1:] or [*MODELS]
    if unknown := set(models) - MODELS.keys():
        sys.exit(f"{', '.join(sorted(unknown))}: no such model; the known ones are {', '.join(MODELS)}")
    commit = subprocess.check_output(["git", "-C", HERE, "rev-parse", "--short=8", "HEAD"], text=True).strip()
    with tempfile.TemporaryDirectory() as directory:
        sources.write(Path(directory))
        for model in models:
            name = f"schema-{SCHEMA_VERSION}/{model}"
            if not (HERE / name).exists():
                _add(name, MODELS[model], commit, Path(directory))


def _add(name: str, command: str, commit: str, directory: Path) -> None:
    target = directory / name.rpartition("/")[2] / "1"
    program = str(Path(sys.executable).with_name("bf16-convert"))
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(HERE))))
    arguments = [*command.split(), "--out", f"{target.parent.name}/1"]
    subprocess.run([program, *arguments], cwd=directory, env=os.environ | {"PYTHONPATH": path}, check=True)
    if "--no-residual" not in arguments:
        out = directory / f"{target.parent.name}.restored"
        subprocess.run([program, "restore", target, "--out", out], check=True)
        with (HERE / "restored.sha256").open("a", encoding="utf-8") as file:
            file.write(f"{sources.digest(load_file(out))}  {name}\n")
    shutil.copytree(target, HERE / name / "1")
    with (HERE / "README.md").open("a", encoding="utf-8") as file:
        file.write(f"| `{name}` | {commit} |\n")


if __name__ == "__main__":
    main()
