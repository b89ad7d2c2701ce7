"""Files that an export copies from a Hugging Face directory: by name, of limited size, from nowhere else, never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hfzoo
import pytest
import torch
from converting import Cli

from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import SourceError
from converter.read.huggingface import model_directory as module
from converter.read.huggingface.model_directory import companions


def _directory(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "bert"} | config))
    return path


def test_only_known_files_are_copied_and_the_others_that_may_be_needed_are_named(tmp_path: Path) -> None:
    _directory(tmp_path)
    rarer = ["target_vocab.json", "vocab-src.json", "spm_char.model", "source.spm", "bpe.codes", "chat_template.jinja"]
    known = [*rarer, "LICENSE", "processor_config.json", "tokenizer.json", "vocab.txt"]
    weights = ("model.safetensors", "pytorch_model.bin.index.json", "flax_model.msgpack")
    for name in (*known, *weights, "README.md", "optimizer.pt", "training_args.bin", ".gitattributes"):
        (tmp_path / name).write_text(name)
    (tmp_path / "onnx").mkdir()
    found, notes = companions(tmp_path)
    assert sorted(found) == sorted([*known, "config.json"])
    assert found["vocab.txt"] == b"vocab.txt"
    assert notes == []
    for name in ("modeling_custom.py", "words.dict"):
        (tmp_path / name).write_text("")
    found, [note] = companions(tmp_path)
    assert sorted(found) == sorted([*known, "config.json"])
    assert note.startswith("not copied beside the exported weights: 'modeling_custom.py', 'words.dict'; copy those")


def test_the_config_states_bfloat16_wherever_it_stated_a_dtype(tmp_path: Path) -> None:
    config = {"dtype": "float32", "text_config": {"torch_dtype": "float32", "depth": 2}, "vision_config": {"depth": 1}}
    assert json.loads(companions(_directory(tmp_path, **config))[0]["config.json"]) == {
        "model_type": "bert",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16", "depth": 2},
        "vision_config": {"depth": 1},
    }


def test_a_link_out_of_the_directory_is_rejected(tmp_path: Path) -> None:
    """Otherwise the author of a repository could publish any file that the converter's user can read."""
    (tmp_path / "secret").write_text("the owner's")
    _directory(tmp_path / "m")
    (tmp_path / "m" / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match=r"vocab\.txt: a link out of the directory"):
        companions(tmp_path / "m")


def test_links_of_the_hubs_cache_to_its_own_blobs_are_followed(tmp_path: Path) -> None:
    blobs = tmp_path / "models--acme--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123").write_text("a\nb\n")
    snapshot = _directory(tmp_path / "models--acme--m" / "snapshots" / "abc")
    (snapshot / "vocab.txt").symlink_to("../../blobs/0123")
    assert companions(snapshot)[0]["vocab.txt"] == b"a\nb\n"


def test_a_file_beyond_the_limit_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 1 << 20)
    _directory(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(SourceError, match=r"tokenizer\.json: larger than 1 MiB"):
        companions(tmp_path)


@pytest.mark.long
def test_transformers_loads_a_bf16_export_and_gives_nearly_the_same_outputs(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    import transformers

    source = hfzoo.save("bert", tmp_path / "bert", vocab_size=640)
    (source / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    (source / "words.dict").write_text("")
    done = cli("checkpoint", source, "--out", target, "--format", "hf", "--no-report").published()
    assert "not copied beside the exported weights: 'words.dict';" in done.out
    exported = Artifact.open(target).manifest.exports["hf"]
    assert exported.files == ["model.safetensors", "config.json", "vocab.txt"]
    loaded = transformers.AutoModel.from_pretrained(target)
    original = transformers.AutoModel.from_pretrained(source, dtype=torch.float32)
    assert loaded.dtype is torch.bfloat16
    ids = torch.randint(0, 640, (4, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = original.eval()(ids).last_hidden_state, loaded.eval()(ids).last_hidden_state.float()
        in_fp32 = loaded.float()(ids).last_hidden_state
    assert (found - expected).norm() < 2e-2 * expected.norm()
    assert (in_fp32 - expected).norm() < (found - expected).norm()  # the error of bf16 activations is not in the files
    cli("verify", target).published()
