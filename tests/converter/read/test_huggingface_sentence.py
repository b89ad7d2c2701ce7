"""sentence-transformers directories: pooling, projection and normalisation become an output of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hfzoo
import numpy as np
import pytest
import torch
from converting import Cli
from restored import assert_restored
from safetensors.torch import load_file, save_file

from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import load, load_reference
from converter.options import Options, parse_target
from converter.process.quiet import quiet
from converter.read import huggingface, oracles
from converter.read.huggingface import sentence
from converter.read.huggingface.directory import SentenceModule

CPU = ("--format", "onnx", "--profile", "cpu", "--no-report")
FEEDS = {
    "input_ids": np.array([[5, 6, 7, 8, 9], [9, 8, 7, 0, 0]]),
    "attention_mask": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    "token_type_ids": np.zeros((2, 5), np.int64),
}


def directory(root: Path, transformer: str = "", **pooling: Any) -> Path:
    """Write a tiny BERT with pooling, a projection and normalisation; return its directory."""
    with quiet():
        hfzoo.save("bert", root / transformer)
    dense = root / "2_Dense"
    dense.mkdir()
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | pooling))
    activation = "torch.nn.modules.activation.Tanh"
    (dense / "config.json").write_text(
        json.dumps({"in_features": 32, "out_features": 48, "activation_function": activation})
    )
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((48, 32), generator=generator) / 6
    save_file({"linear.weight": weight, "linear.bias": torch.zeros(48)}, dense / "model.safetensors")
    kinds = [("Transformer", transformer), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds)
    ]
    (root / "modules.json").write_text(json.dumps(modules))
    return root


@pytest.mark.long
@pytest.mark.slow
def test_a_directory_serves_embeddings_of_tokens_and_of_the_sentence(cli: Cli, tmp_path: Path, target: Path) -> None:
    """The transformer is in a directory of its own, as in older files. The weights of every module are restored."""
    root = directory(tmp_path / "model", "0_Transformer", pooling_mode_mean_tokens=True)
    cli("checkpoint", root, "--out", target, *CPU).published()
    artifact = Artifact.open(target)
    outputs = [(entry.name, entry.kind, entry.shape) for entry in artifact.manifest.outputs]
    assert outputs == [
        ("last_hidden_state", "embedding", ["batch", "seq", 32]),
        ("sentence_embedding", "embedding", ["batch", 48]),
    ]
    dense = load_file(root / "2_Dense" / "model.safetensors")
    for runtime in (load_reference(artifact), load(artifact, "cpu")):
        found = runtime.run(FEEDS)
        mask = FEEDS["attention_mask"][..., None]
        pooled = (found["last_hidden_state"] * mask).sum(axis=1) / mask.sum(axis=1)
        projected = np.tanh(pooled @ dense["linear.weight"].numpy().T)
        expected = projected / np.linalg.norm(projected, axis=1, keepdims=True)
        tolerance = 1e-5 if runtime.info.profile == "reference" else 1e-2
        np.testing.assert_allclose(found["sentence_embedding"], expected, atol=tolerance)
        runtime.close()
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    whole = load_file(root / "0_Transformer" / "model.safetensors") | {f"2_Dense.{n}": t for n, t in dense.items()}
    assert_restored(tmp_path / "fp32.safetensors", {name: tensor.numpy() for name, tensor in whole.items()})


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[[], huggingface.LoadedModel]:
    root = directory(tmp_path / "model", "0_Transformer", pooling_mode_mean_tokens=True)
    options = Options(source=root, target=parse_target(tmp_path / "m" / "1"))
    return lambda: huggingface.load(options, huggingface.read_tensors(root)[0])


def test_the_oracle_is_the_library_itself_so_a_wrong_pooling_is_found(
    loaded: Callable[[], huggingface.LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sentence._POOLINGS, "mean", lambda tokens, _mask: tokens.mean(dim=1))
    found = loaded()
    assert found.oracle is not None
    assert "sentence-transformers" in found.oracle.how
    assert found.notes == ()
    [theirs], [ours] = found.oracle([FEEDS]), oracles.of_module(found.model)([FEEDS])
    np.testing.assert_array_equal(theirs["last_hidden_state"], ours["last_hidden_state"])
    assert np.linalg.norm(theirs["sentence_embedding"][1] - ours["sentence_embedding"][1]) > 0.1
    monkeypatch.undo()
    [ours] = oracles.of_module(loaded().model)([FEEDS])
    np.testing.assert_allclose(theirs["sentence_embedding"], ours["sentence_embedding"], rtol=1e-4, atol=1e-6)


def test_without_the_library_the_conversion_says_that_the_pooling_was_not_checked(
    loaded: Callable[[], huggingface.LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers.sentence_transformer", None)
    found = loaded()
    [note] = found.notes
    assert "not checked against sentence-transformers" in note
    assert "pip install 'bf16kit[sentence]'" in note
    assert found.oracle is not None
    assert found.oracle.how.endswith(note)


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
@pytest.mark.parametrize("padded", ["right", "left"])
def test_pooling_equals_that_of_sentence_transformers(mode: str, padded: str, tmp_path: Path) -> None:
    theirs = pytest.importorskip("sentence_transformers.models")
    tokens = torch.randn((3, 7, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7, [1, 0, 0, 0, 0, 0, 0]])
    if padded == "left":
        mask = mask.flip(1)
    part = SentenceModule("Pooling", tmp_path, {"pooling_mode": mode})
    [ours] = sentence._steps(part, {})
    expected = theirs.Pooling(8, pooling_mode=mode)({"token_embeddings": tokens, "attention_mask": mask})
    torch.testing.assert_close(ours(tokens, mask), expected["sentence_embedding"])


def test_several_pooling_switches_of_older_files_may_be_set_together(tmp_path: Path) -> None:
    switches = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}
    [pooling] = sentence._steps(SentenceModule("Pooling", tmp_path, switches), {})
    tokens, mask = torch.arange(24.0).reshape(1, 3, 8), torch.ones((1, 3))
    torch.testing.assert_close(pooling(tokens, mask), torch.cat([tokens[:, 0], tokens.mean(dim=1)], dim=1))


def modules(*entries: object) -> str:
    return json.dumps([{"path": "", "type": "sentence_transformers.models.Transformer"}, *entries])


@pytest.mark.parametrize(
    ("listing", "said"),
    [
        ("{", "modules.json: not JSON"),
        ('{"a": 1}', "modules.json: is not a list of modules"),
        ('[{"path": "", "type": "sentence_transformers.models.WordEmbeddings"}]', "its first module is a"),
        (modules({"path": "../../evil", "type": "x.Pooling"}), "the module path '../../evil' is not a plain name"),
        (modules({"path": "1_CNN", "type": "sentence_transformers.models.CNN"}), "a CNN module is not supported"),
        (modules({"path": "2_Dense", "type": "sentence_transformers.models.Dense"}), "neither model.safetensors"),
    ],
)
def test_invalid_modules_are_rejected_by_name(cli: Cli, tmp_path: Path, target: Path, listing: str, said: str) -> None:
    with quiet():
        root = hfzoo.save("bert", tmp_path / "model")
    (root / "modules.json").write_text(listing)
    cli("checkpoint", root, "--out", target).refused(2, said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"activation_function": "os.system"}, "activation_function 'system' is not one of torch.nn's"),
        ({"use_residual": True}, "with a residual or another input is not supported"),
    ],
)
def test_an_unsupported_projection_is_rejected(
    cli: Cli, tmp_path: Path, target: Path, config: dict[str, Any], said: str
) -> None:
    root = directory(tmp_path / "model")
    (root / "2_Dense" / "config.json").write_text(json.dumps(config))
    cli("checkpoint", root, "--out", target).refused(2, said)
