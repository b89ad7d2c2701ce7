"""Every command rejects an artifact that changed since it was published, and names the file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from converting import Cli

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import sealed

_FILES = (
    "cpu.onnx",
    "cuda.onnx",
    "cpu-bf16.onnx",
    "golden.safetensors",
    "measurements.json",
    "model.torchscript.pt",
    "reference.onnx",
    "report.html",
    "residual.bin",
    "weights.bf16",
    "weights.fp32",
)


@pytest.fixture
def damaged(mlp: Artifact, tmp_path: Path) -> Path:
    """Return a copy of an artifact with every kind of file, which the test may damage."""
    return Path(shutil.copytree(mlp.path, tmp_path / "mlp" / "1"))


def _commands(artifact: Path) -> list[tuple[str | Path, ...]]:
    return [
        ("verify", artifact),
        ("inspect", artifact),
        ("restore", artifact, "--out", artifact.parent / "fp32.safetensors"),
    ]


def _flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


def test_every_file_of_an_artifact_is_covered_here(mlp: Artifact) -> None:
    assert sorted(mlp.manifest.files) == sorted(_FILES)


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", _FILES)
def test_a_flipped_bit_is_caught_and_the_file_named(cli: Cli, damaged: Path, name: str, at: float) -> None:
    _flip(damaged / name, at)
    for command in _commands(damaged):
        cli(*command).refused(2, f"{damaged / name}: its sha256 is", "convert the artifact again")
    assert not (damaged.parent / "fp32.safetensors").exists()


@pytest.mark.parametrize("name", _FILES)
def test_a_truncated_or_missing_file_is_named(cli: Cli, damaged: Path, name: str) -> None:
    size = (damaged / name).stat().st_size
    (damaged / name).write_bytes((damaged / name).read_bytes()[:-1])
    cli("verify", damaged).refused(2, f"{damaged / name}: {size - 1} bytes, the manifest says {size}")
    (damaged / name).unlink()
    cli("verify", damaged).refused(
        2, f"{damaged / name}: cannot be read: No such file or directory; copy or convert the artifact again"
    )


def test_a_flipped_bit_of_the_manifest_is_caught(cli: Cli, damaged: Path) -> None:
    """The manifest holds the digests of all other files, and its own."""
    whole = (damaged / "manifest.json").read_bytes()
    for position in range(0, len(whole), len(whole) // 40):
        data = bytearray(whole)
        data[position] ^= 0x10
        (damaged / "manifest.json").write_bytes(data)
        cli("inspect", damaged).refused(2, f"{damaged / 'manifest.json'}: ")


def _edit(artifact: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = artifact / "manifest.json"
    fields = json.loads(path.read_bytes())
    change(fields)
    path.write_bytes(sealed(fields))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(schema_version=99, colour="blue"), "newer"),
        (lambda m: m.update(colour="blue"), "colour"),
        (lambda m: m.pop("tensors"), "no stored tensor 'up.weight'"),
        (lambda m: m.pop("source"), "source"),
        (lambda m: m["files"].update({"../x": m["files"]["cpu.onnx"]}), "../x"),
        (lambda m: m["profiles"]["cpu"].update(graph="/etc/passwd"), "/etc/passwd"),
        (lambda m: m["tensors"][0].update(offset=10**9), "beyond the end"),
        (lambda m: m["files"].pop("weights.bf16"), "weights.bf16"),
    ],
)
def test_a_manifest_that_violates_the_schema_is_rejected(
    cli: Cli, damaged: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    _edit(damaged, change)
    for command in _commands(damaged):
        cli(*command).refused(2, said)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]"])
def test_a_file_that_is_not_a_manifest_is_rejected(cli: Cli, damaged: Path, content: bytes) -> None:
    (damaged / "manifest.json").write_bytes(content)
    cli("verify", damaged).refused(2, "manifest.json")


def test_directories_that_are_not_artifacts_are_rejected(cli: Cli, tmp_path: Path) -> None:
    for command in _commands(tmp_path):
        cli(*command).refused(2, "not an artifact, it has no manifest.json")
    for command in _commands(tmp_path / "absent"):
        cli(*command).refused(2, "absent: no such directory")
    (tmp_path / "file").write_text("x")
    cli("inspect", tmp_path / "file").refused(2, "file: not a directory, as an artifact is")


def test_an_artifact_is_rejected_as_a_source(cli: Cli, small: Artifact, target: Path) -> None:
    cli("checkpoint", small.path, "--out", target).refused(2, "is a bf16kit artifact already", "restore")


def test_a_link_out_of_the_artifact_is_rejected(cli: Cli, damaged: Path) -> None:
    (damaged / "weights.bf16").rename(damaged.parent / "elsewhere")
    (damaged / "weights.bf16").symlink_to("../elsewhere")
    cli("verify", damaged).refused(2, "a link out of")
