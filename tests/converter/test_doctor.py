"""``bf16-convert doctor``: what is installed, what can be converted, and how to install the rest."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from converting import Cli
from savedmodels import stand_in

from bf16kit.runtime.ort import kernel
from converter.commands.doctor import record
from converter.read import tensorflow


def test_a_missing_part_is_shown_with_the_command_that_installs_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = stand_in(tmp_path / "bare", "", {})
    monkeypatch.setenv(tensorflow.VARIABLE, str(bare))
    out = cli("doctor").published().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "TensorFlow SavedModel no: needs TensorFlow" in lines
    assert all(f"    {command}" in out for command in tensorflow.PREPARE)
    assert "ONNX yes" in lines


def test_a_source_is_possible_if_its_parts_are_installed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = stand_in(tmp_path / "python", "")
    monkeypatch.setenv(tensorflow.VARIABLE, str(python))
    found = json.loads(cli("doctor", "--json").published().out)
    assert found["version"] == 1
    installed = {part["name"]: part for part in found["installed"]}
    assert installed["TensorFlow"] == {
        "name": "TensorFlow",
        "found": f"tensorflow 2.21.0, tf2onnx 1.17.0 in {python}",
        "remedy": "",
    }
    assert {"name": "TensorFlow SavedModel", "possible": True, "missing": []} in found["sources"]
    assert {"name": "onnx", "possible": True, "missing": []} in found["formats"]


def test_doctor_succeeds_on_a_misconfigured_machine(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tensorflow.VARIABLE, "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(kernel.VARIABLE, "abacus")
    out = cli("doctor").published().out
    assert "/nowhere/python: cannot be run as a Python" in out
    assert "apt-get install g++" in out
    assert f"{kernel.VARIABLE} is 'abacus'" in out


def test_every_missing_part_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing_package(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", missing_package)
    missing = [part for part in record()["installed"] if not part["found"]]
    assert {"torch", "transformers", "onnxruntime"} <= {part["name"] for part in missing}
    assert all(part["remedy"] for part in missing)
