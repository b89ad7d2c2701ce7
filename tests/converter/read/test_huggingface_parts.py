"""Hugging Face directories with more than one pass of one module: ``--with-past``, and sentence-transformers."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hfzoo
import numpy as np
import pytest
import torch
from converting import ONNX_ONLY, Cli
from restored import assert_restored
from safetensors.torch import load_file, save_file

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.options import Options, parse_target
from bf16kit.converter.process.quiet import quiet
from bf16kit.converter.read import oracles
from bf16kit.converter.read.huggingface import load
from bf16kit.converter.read.huggingface.model_directory import Directory
from bf16kit.converter.read.huggingface.module import Cache
from bf16kit.converter.read.onnx_export import to_onnx
from bf16kit.converter.read.sources import output_specs
from bf16kit.converter.write.graphs import serialize
from bf16kit.messages.errors import UsageError
from bf16kit.runtime import Array
from bf16kit.runtime.loading import load as load_profile
from bf16kit.runtime.loading import load_reference
from bf16kit.runtime.ort.onnx import OnnxRuntime

CPU = (*ONNX_ONLY, "--profile", "cpu")


IDS = np.random.default_rng(0).integers(1, 64, (2, 14))
MASK = np.ones((2, 14), np.int64)
MASK[1, :3] = 0  # padded at the left


def test_tokens_fed_piece_by_piece_give_the_logits_of_the_whole(tmp_path: Path) -> None:
    with quiet():
        found = Directory.open(hfzoo.save("gpt2", tmp_path / "model"))
    options = Options(source=found.path, target=parse_target(tmp_path / "m" / "1"), with_past=True)
    model, _, _ = load(options, found, found.tensors()[0])
    oracle = oracles.of_module(model)
    logits = in_pieces(lambda feeds: next(iter(oracle([feeds]))), heads=2)
    np.testing.assert_allclose(logits[MASK == 1], whole("gpt2", found.path)[MASK == 1], rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_an_artifact_gives_the_logits_of_tokens_fed_piece_by_piece(
    cli: Cli, tmp_path: Path, target: Path, name: str
) -> None:
    """The window of mistral is 8 tokens."""
    with quiet():
        directory = hfzoo.save(name, tmp_path / "model", output_hidden_states=name == "gpt2")
    said = " ".join(cli("checkpoint", directory, "--out", target, "--with-past", *CPU).published().out.split())
    assert ("though the model computes it: hidden_states note:" in said) == (name == "gpt2")
    assert ("not served" in said) == (name == "gpt2")
    artifact = Artifact.open(target)
    edges = {entry.name: entry.shape for entry in artifact.manifest.inputs}
    heads = 2 if name == "gpt2" else 1
    assert edges == {
        "input_ids": ["batch", "seq"],
        "attention_mask": ["batch", "total"],
        "past_key_values.0.key": ["batch", heads, "past", 16],
        "past_key_values.0.value": ["batch", heads, "past", 16],
    }
    assert [entry.name for entry in artifact.manifest.outputs] == ["logits", "present.0.key", "present.0.value"]
    expected = whole(name, directory)
    for runtime, tolerance in ((load_reference(artifact), 1e-5), (load_profile(artifact, "cpu"), 1.5e-2)):
        found = in_pieces(runtime.run, heads)
        error = np.linalg.norm((found - expected)[MASK == 1]) / np.linalg.norm(expected[MASK == 1])
        assert error <= tolerance
        runtime.close()


def in_pieces(run: Callable[[dict[str, Array]], Mapping[str, Array]], heads: int) -> Array:
    """Return the logits of all tokens, fed in four pieces; the first has an empty cache."""
    cache = {f"past_key_values.0.{part}": np.zeros((2, heads, 0, 16), np.float32) for part in ("key", "value")}
    logits, start = [], 0
    for stop in (6, 7, 8, 14):
        found = run({"input_ids": IDS[:, start:stop], "attention_mask": MASK[:, :stop], **cache})
        cache = {f"past_key_values.0.{part}": found[f"present.0.{part}"] for part in ("key", "value")}
        logits.append(found["logits"])
        start = stop
    return np.concatenate(logits, axis=1)


def whole(name: str, directory: Path) -> Array:
    """Return the logits of all tokens at once by transformers itself, with each row at its own positions."""
    import transformers

    positions = torch.from_numpy(np.maximum(MASK.cumsum(axis=1) - 1, 0))
    with quiet(), torch.no_grad():
        module = getattr(transformers, hfzoo.MODELS[name][0]).from_pretrained(directory, attn_implementation="eager")
        found = module(torch.from_numpy(IDS), attention_mask=torch.from_numpy(MASK), position_ids=positions)
    return np.asarray(found.logits.numpy())


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("distilbert", (), "--with-past: DistilBertForQuestionAnswering is not a causal language model"),
        ("gpt2", ("--input", "input_ids:int64:batch,seq"), "leave --input out"),
    ],
)
def test_with_past_is_only_for_causal_language_models_with_their_own_inputs(
    cli: Cli, tmp_path: Path, target: Path, name: str, arguments: tuple[str, ...], said: str
) -> None:
    with quiet():
        directory = hfzoo.save(name, tmp_path / "model")
    cli("checkpoint", directory, "--out", target, "--with-past", *arguments).refused(2, said)


def test_with_past_is_rejected_for_a_model_with_recurrent_states() -> None:
    import transformers

    with quiet():
        config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)
        module = transformers.MambaForCausalLM(config)
    with pytest.raises(UsageError):
        Cache(module)


FEEDS = {
    "input_ids": np.array([[5, 6, 7, 8, 9], [9, 8, 7, 0, 0]]),
    "attention_mask": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    "token_type_ids": np.zeros((2, 5), np.int64),
}


def directory(root: Path, transformer: str = "", pooled: int = 32, **pooling: Any) -> Path:
    """Write a tiny BERT with pooling, a projection of what is ``pooled`` and normalisation; return its directory."""
    with quiet():
        hfzoo.save("bert", root / transformer)
    projection = root / "2_Dense"
    projection.mkdir()
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | pooling))
    activation = "torch.nn.modules.activation.Tanh"
    (projection / "config.json").write_text(dense(in_features=pooled, activation_function=activation))
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((48, pooled), generator=generator) / 6
    save_file({"linear.weight": weight, "linear.bias": torch.zeros(48)}, projection / "model.safetensors")
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
    projection = load_file(root / "2_Dense" / "model.safetensors")
    for runtime in (load_reference(artifact), load_profile(artifact, "cpu")):
        found = runtime.run(FEEDS)
        mask = FEEDS["attention_mask"][..., None]
        pooled = (found["last_hidden_state"] * mask).sum(axis=1) / mask.sum(axis=1)
        projected = np.tanh(pooled @ projection["linear.weight"].numpy().T)
        expected = projected / np.linalg.norm(projected, axis=1, keepdims=True)
        tolerance = 1e-5 if runtime.info.profile == "reference" else 1e-2
        np.testing.assert_allclose(found["sentence_embedding"], expected, atol=tolerance)
        runtime.close()
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    whole = load_file(root / "0_Transformer" / "model.safetensors")
    whole |= {f"2_Dense.{name}": tensor for name, tensor in projection.items()}
    assert_restored(tmp_path / "fp32.safetensors", {name: tensor.numpy() for name, tensor in whole.items()})


def test_without_the_library_the_tokens_are_converted_and_a_note_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers.sentence_transformer", None)
    found = Directory.open(directory(tmp_path / "model", pooling_mode_mean_tokens=True))
    options = Options(source=tmp_path / "model", target=parse_target(tmp_path / "m" / "1"))
    model, _, notes = load(options, found, found.tensors()[0])
    assert model.outputs == ("last_hidden_state",)
    [note] = notes
    assert note.startswith("sentence_embedding is left out")
    assert note.endswith("pip install 'bf16kit[sentence]'")


@pytest.mark.long
def test_every_mode_of_pooling_is_exported(tmp_path: Path) -> None:
    """The exported graph gives what the library itself gives from the directory, whatever is padded.

    The library joins what several modes give.
    """
    pytest.importorskip("sentence_transformers")
    modes = ["cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
    found = Directory.open(directory(tmp_path / "model", pooled=32 * len(modes), pooling_mode=modes))
    options = Options(source=tmp_path / "model", target=parse_target(tmp_path / "m" / "1"))
    tensors, _ = found.tensors()
    model, _, notes = load(options, found, tensors)
    assert notes == []
    graph = to_onnx(model, tensors)
    runtime = OnnxRuntime(serialize(graph), model.inputs, output_specs(graph), precision="fp32")
    for mask in (FEEDS["attention_mask"], FEEDS["attention_mask"][:, ::-1].copy()):
        feeds = FEEDS | {"attention_mask": mask}
        [expected] = oracles.of_module(model)([feeds])
        np.testing.assert_allclose(
            runtime.run(feeds)["sentence_embedding"], expected["sentence_embedding"], rtol=1e-4, atol=1e-5
        )


def modules(*entries: object) -> str:
    return json.dumps([{"path": "", "type": "sentence_transformers.models.Transformer"}, *entries])


def dense(**changed: Any) -> str:
    return json.dumps({"in_features": 32, "out_features": 48, "activation_function": "torch.nn.Tanh"} | changed)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("modules.json", '{"a": 1}', "modules.json: not a JSON array"),
        ("modules.json", '[{"path": "", "type": "x.WordEmbeddings"}]', "its first module is not a Transformer"),
        ("modules.json", modules({"path": "../evil", "type": "x.Pooling"}), "path '../evil' is not a plain name"),
        ("modules.json", modules({"path": "1_CNN", "type": "x.CNN"}), "a CNN module is not supported"),
        ("modules.json", modules({"path": "absent", "type": "x.Dense"}), "neither model.safetensors"),
        ("2_Dense/config.json", dense(activation_function="os.system"), "'os.system' is not one of torch.nn's"),
        ("2_Dense/config.json", dense(in_features="many"), "2_Dense: sentence-transformers cannot load it"),
    ],
)
def test_a_module_that_is_not_supported_is_rejected_by_name(
    cli: Cli, tmp_path: Path, target: Path, file: str, content: str, said: str
) -> None:
    root = directory(tmp_path / "model")
    (root / file).write_text(content)
    cli("checkpoint", root, "--out", target).refused(2, said)
