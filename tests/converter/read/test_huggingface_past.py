"""``--with-past``: a causal language model whose cache is among its inputs and outputs."""

from __future__ import annotations

from pathlib import Path

import hfzoo
import numpy as np
import pytest
from converting import Cli

from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime import Array, Runtime
from bf16kit.runtime.loading import load, load_reference
from converter.process.quiet import quiet
from converter.read.huggingface.module import Cache

CPU = ("--format", "onnx", "--profile", "cpu", "--no-report")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", pytest.param("mistral", marks=pytest.mark.long)])
def test_tokens_fed_piece_by_piece_give_the_logits_of_the_whole(
    cli: Cli, tmp_path: Path, target: Path, name: str
) -> None:
    """The first piece has an empty cache; the second row is padded at the left; the window of mistral is 8 tokens."""
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
    ids = np.random.default_rng(0).integers(1, 64, (2, 14))
    mask = np.ones((2, 14), np.int64)
    mask[1, :3] = 0
    expected = whole(name, directory, ids, mask)
    for runtime, tolerance in ((load_reference(artifact), 1e-5), (load(artifact, "cpu"), 1.5e-2)):
        found = in_pieces(runtime, ids, mask, [6, 1, 1, 6], heads)
        error = np.linalg.norm((found - expected)[mask == 1]) / np.linalg.norm(expected[mask == 1])
        assert error <= tolerance
        runtime.close()


def in_pieces(runtime: Runtime, ids: Array, mask: Array, pieces: list[int], heads: int) -> Array:
    cache = {f"past_key_values.0.{part}": np.zeros((2, heads, 0, 16), np.float32) for part in ("key", "value")}
    logits, start = [], 0
    for length in pieces:
        stop = start + length
        found = runtime.run({"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop], **cache})
        cache = {f"past_key_values.0.{part}": found[f"present.0.{part}"] for part in ("key", "value")}
        logits.append(found["logits"])
        start = stop
    return np.concatenate(logits, axis=1)


def whole(name: str, directory: Path, ids: Array, mask: Array) -> Array:
    """Return the logits of all tokens at once by transformers itself, with each row at its own positions."""
    import torch
    import transformers

    positions = torch.from_numpy(np.maximum(mask.cumsum(axis=1) - 1, 0))
    with quiet(), torch.no_grad():
        module = getattr(transformers, hfzoo.MODELS[name][0]).from_pretrained(directory, attn_implementation="eager")
        found = module(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), position_ids=positions)
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


def test_with_past_is_rejected_for_other_sources(cli: Cli, target: Path, onnx_file: Path) -> None:
    cli("checkpoint", onnx_file, "--out", target, "--with-past").refused(2, "is for Hugging Face directories")


def test_with_past_is_rejected_for_a_model_with_recurrent_states() -> None:
    import transformers

    with quiet():
        config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)
        module = transformers.MambaForCausalLM(config)
    with pytest.raises(Exception, match="--with-past: MambaForCausalLM"):
        Cache(module)
