"""``python -m bench.gpu.registry``: write converter/graph/data/cuda_kernels.json from the releases themselves.

Each wheel of onnxruntime-gpu (250 MB) is fetched, its libraries loaded with stand-ins for NVIDIA's, and its registry
asked: no device and nothing of NVIDIA's is needed, Linux on x86-64 and a compiler are. Some 20 s a release.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.gpu.registry import standins
from bench.gpu.registry.rows import Row, table
from bf16kit.system import version_key

# The first of each minor release that bf16kit installs with, and those that are pinned or were.
RELEASES = (
    "1.24.1", "1.24.4", "1.25.0", "1.26.0", "1.27.0", "1.28.0", "1.29.0", "1.30.0", "1.31.0", "1.31.1",
)  # fmt: skip
TARGET = Path(__file__).parents[3] / "converter" / "graph" / "data" / "cuda_kernels.json"
_ASKED = Path(__file__).with_name("asked.py")
_SOURCE = (
    "onnxruntime-gpu's wheels for CPython 3.11, Linux, x86-64, asked by get_all_opkernel_def with stand-ins for"
    " NVIDIA's libraries (python -m bench.gpu.registry); not checked on a device"
)


def installed_release(release: str, directory: Path) -> Path:
    """The release and its stand-ins under ``directory``, fetched unless they are there, or CalledProcessError."""
    site = directory / release
    if (site / ".complete").exists():
        return site
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(directory)]
    subprocess.run([*pip, f"onnxruntime-gpu=={release}"], check=True)
    (wheel,) = directory.glob(f"onnxruntime_gpu-{release}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, [name for name in archive.namelist() if "providers_tensorrt" not in name])
    wheel.unlink()
    standins.stand_in(site / "onnxruntime" / "capi", site / "standins")
    (site / ".complete").touch()
    return site


def environment_for(site: Path) -> dict[str, str]:
    """The environment in which Python finds that release, and it the stand-ins."""
    return os.environ | {
        "PYTHONPATH": str(site),
        "LD_LIBRARY_PATH": str(site / "standins"),
        "ORT_DISABLE_TELEMETRY": "1",
    }


def registered_kernels(release: str, directory: Path) -> list[Row]:
    """The kernels that the release's CUDA provider registers. CalledProcessError where it cannot be had, or ends."""
    command = [sys.executable, str(_ASKED)]
    environment = environment_for(installed_release(release, directory))
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    version, rows = json.loads(done.stdout)
    assert version == release
    return [(domain, op, first, last, types) for domain, op, first, last, types in rows]


def kernel_table_json(kernels_by_release: dict[str, Iterable[Row]]) -> str:
    """The file: its source, the releases, and :func:`~bench.gpu.registry.rows.table`, an operator on each line."""
    table_fields = table(kernels_by_release)
    domains = ",\n".join(
        f"  {json.dumps(domain)}: {{\n"
        + ",\n".join(f"   {json.dumps(op)}: {json.dumps(kernels)}" for op, kernels in sorted(ops.items()))
        + "\n  }"
        for domain, ops in sorted(table_fields["kernels"].items())
    )
    head: dict[str, Any] = {
        "provider": "CUDAExecutionProvider",
        "source": _SOURCE,
        "releases": sorted(kernels_by_release, key=version_key),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    sets = ",\n".join(f"  {json.dumps(each)}" for each in table_fields["sets"])
    return "{\n" + ",\n".join([*lines, f' "sets": [\n{sets}\n ]', f' "kernels": {{\n{domains}\n }}']) + "\n}\n"


def main() -> None:
    """Ask every release, one after another, and write the file."""
    kernels_by_release = {}
    with tempfile.TemporaryDirectory(prefix="bf16kit-registry-") as directory:
        for release in RELEASES:
            kernels_by_release[release] = registered_kernels(release, Path(directory))
            print(f"{release}: {len(kernels_by_release[release])} kernels", flush=True)
    TARGET.write_text(kernel_table_json(dict(kernels_by_release)), "utf-8")


if __name__ == "__main__":
    main()
