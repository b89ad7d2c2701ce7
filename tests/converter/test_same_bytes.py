"""The same input gives the same bytes in another process, with another hash seed and after other imports."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from converting import MLP, SUPPORT
from failing import cancellation

from bf16kit.runtime.ort import kernel

pytestmark = pytest.mark.long  # each test converts in several processes

CONVERT = """
import sys
if sys.argv[1] == "torch":
    import torch, transformers, scipy
from bf16kit.converter.cli import run
sys.exit(run(sys.argv[2:]))
"""
UNLIKE = (
    {"PYTHONHASHSEED": "1"},
    {"PYTHONHASHSEED": "2", "torch": "first", "TZ": "Asia/Tokyo"},
)

MEASURED = {"manifest.json", "measurements.json", "report.html"}


def convert(target: Path, arguments: tuple[str | Path, ...], environment: dict[str, str]) -> dict[str, bytes]:
    """Convert in a separate process and return the bytes of each published file, by name."""
    first = "torch" if environment.pop("torch", "") else "none"
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(SUPPORT), str(root)])
    command = [sys.executable, "-c", CONVERT, first, "checkpoint", *map(str, arguments), "--out", str(target)]
    env = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {file.name: file.read_bytes() for file in target.iterdir()}


@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_processes_with_different_environments_publish_the_same_bytes(
    kind: str, tmp_path: Path, onnx_file: Path, mlp_file: Path
) -> None:
    arguments = (onnx_file,) if kind == "onnx" else (mlp_file, *MLP)
    first, other = (
        convert(tmp_path / str(index) / "m" / "1", arguments, dict(environment))
        for index, environment in enumerate(UNLIKE)
    )
    assert other.keys() == first.keys()
    assert [name for name in first if other[name] != first[name]] == []


def test_a_complete_search_finds_the_same_islands_with_any_hash_seed(tmp_path: Path) -> None:
    """Islands are kept in sets of names, whose order differs between processes."""
    built = cancellation()
    onnx.save(built.proto, tmp_path / "m.onnx")
    (tmp_path / "in").mkdir()
    for index, feed in enumerate(built.feeds):
        np.savez(tmp_path / "in" / f"{index}.npz", x=feed["x"])
    arguments = (tmp_path / "m.onnx", "--samples", tmp_path / "in", "--format", "onnx", "--search-minutes", "60")
    found = [convert(tmp_path / seed / "m" / "1", arguments, {"PYTHONHASHSEED": seed}) for seed in ("1", "2", "3")]
    searches = [each["search"] for each in json.loads(found[0]["measurements.json"])["profiles"].values()]
    assert searches[1] is None  # no search is run for cpu-bf16
    names = {island["name"] for search in searches if search for island in search["islands"]}
    assert names == built.nodes | built.weights
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
def test_only_measurements_depend_on_the_code_path_of_the_kernel(tmp_path: Path, onnx_file: Path) -> None:
    """Measurements may differ in their last digits: the portable path and tiles round sums that the others do not.

    Other paths with fused multiply-add give the same bits, so none of their files differ.
    """
    paths = [path for path in kernel.PATHS if runs(path)]
    found = {path: convert(tmp_path / path / "m" / "1", (onnx_file,), {kernel.VARIABLE: path}) for path in paths}
    fused = [files for path, files in found.items() if path not in ("amx", "portable")]
    assert all(files == fused[0] for files in fused)
    first, *others = found.values()
    for other in others:
        assert {name for name in first if other.get(name) != first[name]} <= MEASURED
        assert but_for_what_was_measured(other) == but_for_what_was_measured(first)


def but_for_what_was_measured(files: dict[str, bytes]) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(files["manifest.json"])
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name not in MEASURED}
    return {key: value for key, value in manifest.items() if key not in ("drift", "digest")}


def runs(path: str) -> bool:
    program = "from bf16kit.runtime.ort.kernel import usable_kernel; usable_kernel()"
    env = {**os.environ, kernel.VARIABLE: path}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=False).returncode == 0
