"""The kind of a source is recognised by its content, because its name may be wrong."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import graphs
from bf16kit.messages.errors import SourceError
from converter.read.detect import Kind, recognise


def _zip(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def test_safetensors_are_recognised_by_their_header_not_their_name(tmp_path: Path) -> None:
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.onnx")
    assert recognise(tmp_path / "model.onnx") is Kind.SAFETENSORS


def test_onnx_of_every_ir_version_is_recognised(tmp_path: Path) -> None:
    """The second byte is the version: 10 is a newline, 9 a tab, and the text that follows may be empty."""
    model = graphs.mlp()
    for model.ir_version in range(3, 14):
        (tmp_path / "model.pt").write_bytes(model.SerializeToString())
        assert recognise(tmp_path / "model.pt") is Kind.ONNX


def test_bare_pickles_of_every_binary_protocol_are_recognised(tmp_path: Path) -> None:
    for protocol in range(2, 6):
        (tmp_path / "w.bin").write_bytes(pickle.dumps({"a": 1}, protocol=protocol))
        assert recognise(tmp_path / "w.bin") is Kind.PICKLE


def test_torch_archives_are_recognised_by_their_records(tmp_path: Path) -> None:
    assert recognise(_zip(tmp_path / "a", "archive/data.pkl", "archive/version")) is Kind.TORCH_ZIP
    assert recognise(_zip(tmp_path / "b", "archive/data.pkl", "archive/constants.pkl")) is Kind.TORCHSCRIPT


def test_a_sharded_checkpoint_is_recognised_by_its_index_and_its_directory(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {}}))
    assert recognise(index) is Kind.SHARDED
    assert recognise(tmp_path) is Kind.SHARDED


def test_a_hugging_face_directory_is_recognised_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert recognise(tmp_path) is Kind.HUGGING_FACE


def test_tensorflows_directories_and_keras_archives_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"")
    assert recognise(tmp_path) is Kind.SAVED_MODEL
    assert recognise(_zip(tmp_path / "x", "config.json", "metadata.json", "model.weights.h5")) is Kind.KERAS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("ein paar Wörter\n".encode(), "is a text file, not a checkpoint"),
        (b"<!doctype html><title>404</title>", "is a text file, not a checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b'{"a": 1}', "is JSON, but not the index"),
        (b"{not json", "is a text file"),
        (b"PK\x03\x04 and nothing more", "truncated or damaged zip"),
        (bytes(range(200, 256)), "first bytes c8 c9 ca"),
        (b"\x00" * 600, "first bytes 00 00"),
    ],
)
def test_files_that_are_not_checkpoints_are_rejected_with_a_description(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(SourceError, match=said):
        recognise(tmp_path / "model.pt")


def test_a_zip_of_something_else_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not one that torch wrote"):
        recognise(_zip(tmp_path / "photos.zip", "a.jpg"))


def test_directories_that_are_not_models_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is not a model"):
        recognise(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert recognise(tmp_path) is Kind.HUGGING_FACE  # sentence-transformers; its reader reports what is wrong with it


def test_a_pipe_is_rejected_and_not_waited_for(tmp_path: Path) -> None:
    """Opening a pipe without a writer would block forever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="neither a file nor a directory"):
        recognise(tmp_path / "pipe")
