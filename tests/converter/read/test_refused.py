"""Sources that cannot be converted, through the whole command: exit code 2, one message, and no file left behind."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import Mlp
from converting import MLP, Cli, tree
from safetensors.numpy import save_file


class Payload:
    """Creates the file ``executed`` in the working directory when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def _truncated(path: Path) -> None:
    save_file({"w": np.ones((64, 64), np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-1])


def _unknown_dtype(path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x00")


_REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "foreign": (lambda path: path.write_bytes(b"GGUF\x03\0\0\0"), "is a GGUF file (llama.cpp), mostly quantised"),
    "missing": (lambda path: None, "no such file or directory"),
    "empty": (lambda path: path.touch(), "is empty"),
    "text": (lambda path: path.write_text("epoch 1: loss 0.3\n"), "is a text file, not a checkpoint"),
    "directory": (lambda path: path.mkdir(), "is not a model"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Payload())), "is a bare pickle"),
    "pickle in a zip": (lambda path: torch.save({"w": Payload()}, path), "holds more than tensors"),
    "whole module": (lambda path: torch.save(Mlp(), path), "holds more than tensors (architectures.Mlp, "),
    "truncated safetensors": (_truncated, "truncated or damaged"),
    "unknown dtype": (_unknown_dtype, "tensor 'w' has the unknown dtype 'F4'"),
    "other shapes": (lambda path: torch.save(Mlp(hidden=8).state_dict(), path), "shape: up.weight is [8, 16]"),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_a_source_that_is_rejected_leaves_no_file_behind(
    cli: Cli, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make, said = _REFUSED[kind]
    make(tmp_path / "source.pt")
    cli("checkpoint", "source.pt", "--out", target, *MLP).refused(2, "source.pt: " if "shape" not in said else "", said)
    assert tree(tmp_path) in ([], ["source.pt"])
