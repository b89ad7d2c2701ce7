"""Hugging Face directories: tiny models made by transformers, never downloaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import hfzoo
import pytest
import torch
from converting import ONNX_ONLY, Cli, tree
from peaks import measured_alone
from restored import assert_restored
from safetensors.torch import load_file, save_file

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.process.quiet import quiet


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


LOAD = """
import sys
from pathlib import Path
from bf16kit.converter.process.memory import map_large_blocks
from bf16kit.converter.read.huggingface.model_directory import Directory
from bf16kit.converter.read.huggingface.module import load_module
from peaks import anonymous, peak_anonymous
map_large_blocks()
def load(name):
    directory = Directory.open(Path(sys.argv[1]) / name)
    return load_module(directory, directory.tensors()[0], directory.path)
for name in ("small", "float32", "float16"):  # transformers is in memory once the first is loaded
    before = anonymous()
    with peak_anonymous() as peak:
        module, _ = load(name)
    print(peak.bytes - before, sum(4 * parameter.numel() for parameter in module.parameters()), end=" ")
    del module
"""


@pytest.mark.long
def test_a_model_is_not_held_in_memory(tmp_path: Path) -> None:
    """80 MB in fp32 are mapped: from the checkpoint, or from temporary files if weights had to be widened."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for name, width in (("small", 64), ("float32", 1024), ("float16", 1024)):
        sizes: dict[str, Any] = {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": 1,
            "vocab_size": 512,
        }
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
        dtype = getattr(torch, name if name != "small" else "float32")
        LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path / name)
    _, _, *taken = map(int, measured_alone(LOAD, str(tmp_path)).split())
    for peak, size in zip(taken[::2], taken[1::2], strict=True):
        assert peak / size < 0.35, f"{peak / size:.2f} times the weights"
    assert not list(tmp_path.glob("float*/.*"))
