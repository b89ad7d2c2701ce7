"""Hugging Face directories: tiny models made by transformers, never downloaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hfzoo
import numpy as np
import pytest
import torch
from converting import ONNX_ONLY, Cli, tree
from mapped import deleted_kb
from restored import assert_restored
from safetensors.torch import load_file, save_file

from bf16kit.artifact.artifact import Artifact
from converter.process.quiet import quiet
from converter.read.huggingface.model_directory import Directory
from converter.read.huggingface.module import load_module


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with quiet():
        return hfzoo.save("bert", tmp_path_factory.mktemp("hf") / "bert")


@pytest.fixture
def copied(bert: Path, tmp_path: Path) -> Path:
    """Return a copy of ``bert`` that a test may damage."""
    return Path(shutil.copytree(bert, tmp_path / "copied"))


@pytest.mark.long
@pytest.mark.parametrize(("labels", "kind"), [(3, "logits"), (1, "regression")])
def test_a_head_gives_logits_whose_top1_is_judged_unless_it_regresses(
    cli: Cli, tmp_path: Path, target: Path, labels: int, kind: str
) -> None:
    with quiet():
        weights = hfzoo.save("roberta", tmp_path / "head", num_labels=labels) / "model.safetensors"
    tensors = load_file(weights)
    ahead = 2.0 * torch.eye(labels)[0]  # one class far ahead: random weights alone would leave ties to rounding
    save_file(tensors | {"classifier.out_proj.bias": ahead}, weights, {"format": "pt"})
    cli("checkpoint", tmp_path / "head", "--out", target, *ONNX_ONLY).published()
    manifest = Artifact.open(target).manifest
    assert [(entry.name, entry.kind, entry.shape) for entry in manifest.outputs] == [
        ("logits", kind, ["batch", labels])
    ]
    for profile in ("cpu", "cuda"):
        found = manifest.drift[profile].outputs["logits"].get("top1_agreement")
        assert (found is None) == (kind == "regression")
        assert found is None or found["mean"] >= 0.99
        assert manifest.drift[profile].emulated == (profile == "cuda")


@pytest.mark.long
def test_shards_and_named_dimensions_are_supported(cli: Cli, tmp_path: Path, target: Path, copied: Path) -> None:
    whole = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    names = sorted(whole)
    weight_map = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({n: whole[n] for n in names if weight_map[n] == shard}, copied / shard, {"format": "pt"})
    (copied / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    inputs = ("--input", "input_ids:int64:n,8", "--input", "attention_mask:int64:n,8")
    cli("checkpoint", copied, "--out", target, *inputs, *ONNX_ONLY, "--profile", "cpu").published()
    assert [entry.shape for entry in Artifact.open(target).manifest.inputs] == [["n", 8]] * 2
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", {name: tensor.numpy() for name, tensor in whole.items()})


def _config(directory: Path, **changed: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changed))


def _without_a_layer(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "intermediate" not in name}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.long
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: (d / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda d: _config(d, model_type="unheard-of"), "transformers cannot load it"),
        (
            lambda d: _config(d, architectures=["BertForEverything"]),
            "BertForEverything is not known to the installed transformers",
        ),
        (lambda d: _config(d, vocab_size=99), "shape: embeddings.word_embeddings.weight is [64, 32]"),
        (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors, its index, nor pytorch_model.bin"),
        (_without_a_layer, "missing: encoder.layer.0.intermediate.dense.weight"),
        (_cut, "model.safetensors: truncated or damaged"),
    ],
)
def test_a_damaged_directory_is_rejected(
    cli: Cli, tmp_path: Path, target: Path, copied: Path, damage: Any, said: str
) -> None:
    damage(copied)
    before = tree(tmp_path)
    cli("checkpoint", copied, "--out", target).refused(2, said)
    assert tree(tmp_path) == before


def test_code_in_the_directory_is_not_run(cli: Cli, tmp_path: Path, target: Path, copied: Path) -> None:
    (copied / "modeling_evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: ...\n")
    _config(copied, model_type="evil", auto_map={"AutoModel": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"})
    cli("checkpoint", copied, "--out", target).refused(2, "transformers cannot load it")
    assert not (tmp_path / "executed").exists()


def test_fp32_weights_are_those_of_the_mapped_checkpoint_and_widened_ones_are_in_files(
    tmp_path: Path, copied: Path
) -> None:
    for dtype in (torch.float32, torch.float16):
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(copied / "model.safetensors").items()}
        large = "embeddings.word_embeddings.weight"
        tensors[large] = torch.ones(1 << 14, 32, dtype=dtype)  # 2 MiB in fp32
        save_file(tensors, copied / "model.safetensors", {"format": "pt"})
        _config(copied, vocab_size=1 << 14)
        directory, before = Directory.open(copied), deleted_kb()
        arrays, _ = directory.tensors()
        module, _ = load_module(directory, arrays, tmp_path)
        found = module.get_parameter(large).detach().numpy()
        assert np.shares_memory(found, arrays[large]) == (dtype is torch.float32)
        assert (deleted_kb() >= before + 2 * 1024) == (dtype is torch.float16)
