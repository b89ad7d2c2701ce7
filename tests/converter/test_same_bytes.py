"""The same input gives the same bytes in another process, with another hash seed and after other imports."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from converting import MLP, ONNX_ONLY, SUPPORT, Cli
from failing import Failing, cancellation

from bf16kit.messages.errors import ConfigError
from bf16kit.runtime.ort import kernel

pytestmark = pytest.mark.long  # conversions in two processes, and on every path

CONVERT = """
import gc, json, sys
if sys.argv[1] == "torch":
    import torch, transformers, scipy
from bf16kit.converter.cli import run
code = max(run(["checkpoint", *arguments]) for arguments in json.loads(sys.argv[2]))
gc.freeze()
sys.exit(code)
"""
UNLIKE = (
    {"PYTHONHASHSEED": "1"},
    {"PYTHONHASHSEED": "2", "torch": "first", "TZ": "Asia/Tokyo"},
)

MEASURED = {"manifest.json", "measurements.json", "report.html"}
Files = dict[str, bytes]  # of an artifact, by name


def convert(root: Path, sources: dict[str, tuple[str | Path, ...]], environment: dict[str, str]) -> dict[str, Files]:
    """Convert in a separate process, one source after the other, and return the published files of each, by name."""
    first = "torch" if environment.pop("torch", "") else "none"
    path = os.pathsep.join([str(SUPPORT), str(Path(__file__).parents[2])])
    commands = [[*map(str, given), "--out", f"{root}/{name}/1"] for name, given in sources.items()]
    command = [sys.executable, "-c", CONVERT, first, json.dumps(commands)]
    env = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {name: files_in(root / name / "1") for name in sources}


def files_in(artifact: Path) -> Files:
    return {file.name: file.read_bytes() for file in artifact.iterdir()}


@pytest.fixture(scope="module")
def searched() -> Failing:
    return cancellation()


@pytest.fixture(scope="module")
def published(
    tmp_path_factory: pytest.TempPathFactory, onnx_file: Path, mlp_file: Path, searched: Failing
) -> list[dict[str, Files]]:
    """Return what two processes publish: the one imports nothing before the first source, and torch for the second."""
    root = tmp_path_factory.mktemp("same")
    onnx.save(searched.proto, root / "m.onnx")
    (root / "in").mkdir()
    for index, feed in enumerate(searched.feeds):
        np.savez(root / "in" / f"{index}.npz", x=feed["x"])
    search = (root / "m.onnx", "--samples", root / "in", "--format", "onnx", "--search-minutes", "60")
    sources = {"onnx": (onnx_file,), "torch": (mlp_file, *MLP), "search": search}
    return [convert(root / str(index), sources, dict(each)) for index, each in enumerate(UNLIKE)]


@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_processes_with_different_environments_publish_the_same_bytes(
    kind: str, published: list[dict[str, Files]]
) -> None:
    first, other = (each[kind] for each in published)
    assert other.keys() == first.keys()
    assert [name for name in first if other[name] != first[name]] == []


def test_a_complete_search_finds_the_same_islands_with_any_hash_seed(
    published: list[dict[str, Files]], searched: Failing
) -> None:
    """Islands are kept in sets of names, whose order differs between processes."""
    first, other = (each["search"] for each in published)
    searches = [each["search"] for each in json.loads(first["measurements.json"])["profiles"].values()]
    assert searches[1] is None  # no search is run for cpu-bf16
    names = {island["name"] for search in searches if search for island in search["islands"]}
    assert names == searched.nodes | searched.weights
    assert other == first


@pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
def test_only_measurements_depend_on_the_code_path_of_the_kernel(
    cli: Cli, tmp_path: Path, onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measurements may differ in their last digits: the portable path and tiles round sums that the others do not.

    Other paths with fused multiply-add give the same bits, so none of their files differ.
    """
    found = {}
    for path in kernel.PATHS:
        monkeypatch.setenv(kernel.VARIABLE, path)
        with suppress(ConfigError):  # this processor cannot run it
            kernel.usable_kernel()
            cli("checkpoint", onnx_file, "--out", tmp_path / path / "m" / "1", *ONNX_ONLY).published()
            found[path] = files_in(tmp_path / path / "m" / "1")
    fused = [files for path, files in found.items() if path not in ("amx", "portable")]
    assert all(files == fused[0] for files in fused)
    first, *others = found.values()
    for other in others:
        assert {name for name in first if other.get(name) != first[name]} <= MEASURED
        assert but_for_what_was_measured(other) == but_for_what_was_measured(first)


def but_for_what_was_measured(files: Files) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(files["manifest.json"])
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name not in MEASURED}
    return {key: value for key, value in manifest.items() if key not in ("drift", "digest")}
