"""A directory that a stray file makes one source: the message names the source and the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from converter.bulk.mistaken import explain_recognition


@pytest.mark.parametrize(
    ("stray", "what"),
    [
        ("other.pdparams", "is taken for one source, and is a PaddlePaddle model"),
        ("jax_7/default/manifest.ocdbt", "is taken for one source, an Orbax (JAX) checkpoint"),
        ("w/.zarray", "is taken for one source, an Orbax (JAX) checkpoint"),
        ("m.safetensors.index.json", "is taken for one source, sharded safetensors"),
        ("config.json", "is taken for one source, a Hugging Face model directory"),
        ("saved_model.pb", "is taken for one source, a TensorFlow SavedModel"),
    ],
)
def test_the_stray_file_is_named(tmp_path: Path, stray: str, what: str) -> None:
    (tmp_path / stray).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / stray).write_text("{}")
    (tmp_path / "good.pt").write_text("")
    said = explain_recognition(tmp_path)
    assert what in said
    first = f"{stray.partition('/')[0]}/" if "/" in stray else stray
    assert f"because it contains {first}; to convert the checkpoints beside it, move it to another directory" in said


def test_many_stray_files_are_counted(tmp_path: Path) -> None:
    for index in range(7):
        (tmp_path / f"{index}.pdparams").write_text("")
    said = explain_recognition(tmp_path)
    assert "because it contains 0.pdparams, 1.pdparams, 2.pdparams, 3.pdparams, 4.pdparams and 2 more; to" in said
