"""Every kind of transformers model converts without changes, and gives the outputs of its own torch module."""

import re
from pathlib import Path
from typing import Any

import hfzoo
import numpy as np
import onnx
import pytest
import torch
import transformers
from converting import ONNX_ONLY, Cli

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.process.quiet import quiet
from bf16kit.converter.read.safetensors_file import read_file
from bf16kit.runtime.loading import load, load_reference

pytestmark = pytest.mark.long  # exports one model after the other

Edges = dict[str, list[int | str]]
TEXT: Edges = {"input_ids": ["batch", "seq"], "attention_mask": ["batch", "seq"]}
SEGMENTS: Edges = TEXT | {"token_type_ids": ["batch", "seq"]}
DECODER: Edges = {"decoder_input_ids": ["batch", "decoder_seq"], "decoder_attention_mask": ["batch", "decoder_seq"]}
IMAGE: Edges = {"pixel_values": ["batch", 3, 32, 32]}
SPECTRUM: Edges = {"input_features": ["batch", 16, 100]}
HIDDEN, ENCODER, CACHE = "last_hidden_state", "encoder_last_hidden_state", "past_key_values"

# model: inputs, outputs, what is computed and not served
EXPECTED: dict[str, tuple[Edges, set[str], str]] = {
    "bert": (SEGMENTS, {HIDDEN, "pooler_output"}, ""),
    "roberta": (SEGMENTS, {"logits"}, ""),
    "distilbert": (TEXT, {"start_logits", "end_logits"}, ""),
    "electra": (SEGMENTS, {"logits"}, ""),
    "albert": (SEGMENTS, {HIDDEN, "pooler_output"}, ""),
    "mpnet": (TEXT, {HIDDEN, "pooler_output"}, ""),
    "deberta-v2": (TEXT, {"logits"}, ""),
    "gpt2": (TEXT, {"logits"}, f"{CACHE}; --with-past serves the cache"),
    "llama": (TEXT, {"logits"}, f"{CACHE}; --with-past serves the cache"),
    "mistral": (TEXT, {"logits"}, f"{CACHE}; --with-past serves the cache"),
    "qwen2": (TEXT, {"logits"}, f"{CACHE}; --with-past serves the cache"),
    "t5": (TEXT | DECODER, {"logits", ENCODER}, CACHE),
    "t5-encoder": (TEXT, {HIDDEN}, ""),
    "bart": (TEXT | DECODER, {"logits", ENCODER}, CACHE),
    "whisper": (SPECTRUM | DECODER, {"logits", ENCODER}, CACHE),
    "clip": (
        TEXT | {"pixel_values": ["images", 3, 32, 32]},
        {"logits_per_image", "logits_per_text", "text_embeds", "image_embeds"}
        | {f"{part}_model_output.{name}" for part in ("text", "vision") for name in (HIDDEN, "pooler_output")},
        "",
    ),
    "vit": (IMAGE, {"logits"}, ""),
    "resnet": (IMAGE, {"logits"}, ""),
    "convnext": (IMAGE, {"logits"}, ""),
    "segformer": (IMAGE, {"logits"}, ""),
    "mixtral": (TEXT, {"logits"}, f"{CACHE}; --with-past serves the cache"),
    "detr": (IMAGE, {"logits", "pred_boxes", HIDDEN, ENCODER}, ""),
    "wav2vec2": ({"input_values": ["batch", "samples"]}, {"logits"}, ""),
}


# The number of RMS normalisations; the kernel computes all of them.
RMS_NORMALISATIONS = {"llama": 3, "mistral": 3, "qwen2": 3, "mixtral": 3, "t5": 7, "t5-encoder": 3}

_PARTS = ("text_model_output", "vision_model_output")


# One of each kind; `make test-models` runs the others, to save time here. BERT is the demo's model, GPT-2 that of
# test_huggingface_parts.py.
ALWAYS = ("deberta-v2", "mixtral", "t5", "clip", "resnet", "wav2vec2")
ALL = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.models) for name in EXPECTED]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_model_converts_and_gives_the_outputs_of_its_module(
    tmp_path: Path, cli: Cli, target: Path, name: str
) -> None:
    inputs, outputs, left_out = EXPECTED[name]
    directory = tmp_path / name
    with quiet():
        hfzoo.save(name, directory)
    said = cli("checkpoint", directory, "--out", target, "--profile", "cpu", *ONNX_ONLY, "--format", "hf").published()
    (note,) = re.findall(
        r"not served, though the model computes it: (.*?)(?: note:|$)", " ".join(said.out.split())
    ) or [""]
    assert note == left_out
    artifact = Artifact.open(target)
    assert {entry.name: entry.shape for entry in artifact.manifest.inputs} == inputs
    assert {entry.name for entry in artifact.manifest.outputs} == outputs
    assert artifact.manifest.source.format == "huggingface"
    feeds = artifact.golden().inputs
    expected = answers(hfzoo.MODELS[name][0], directory, feeds)
    for runtime, tolerance in ((load_reference(artifact), 1e-5), (load(artifact, "cpu"), 1.5e-2)):
        found = runtime.run(feeds)
        runtime.close()
        for output in outputs:
            error = np.linalg.norm(found[output] - expected[output]) / np.linalg.norm(expected[output])
            assert error <= tolerance, (output, error)
    stored, original = dict(artifact.checkpoint_tensors()), read_file(directory / "model.safetensors")
    for tensor, array in original.items():
        np.testing.assert_array_equal(stored[tensor], array)
    with quiet():
        loaded = transformers.AutoModel.from_pretrained(target)
    assert loaded.dtype is torch.bfloat16
    exported = read_file(target / "model.safetensors")
    assert list(exported) == list(original)
    for tensor, array in original.items():
        np.testing.assert_array_equal(exported[tensor], array.astype(exported[tensor].dtype))
    assert {array.dtype.name for array in exported.values()} >= {"bfloat16", "float32"}
    operators = [node.op_type for node in onnx.load(artifact.file("cpu.onnx"), load_external_data=False).graph.node]
    assert sum("RmsNorm" in op for op in operators) == RMS_NORMALISATIONS.get(name, 0)
    assert ("Sqrt" in operators, "Pow" in operators) == (False, False) or name not in RMS_NORMALISATIONS


def answers(architecture: str, directory: Path, feeds: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs of transformers itself for ``feeds``."""
    with quiet(), torch.no_grad():
        module = getattr(transformers, architecture).from_pretrained(directory, attn_implementation="eager")
        found = module(**{name: torch.from_numpy(np.array(array)) for name, array in feeds.items()})
        parts = {f"{key}.{name}": value for key, part in found.items() if key in _PARTS for name, value in part.items()}
    return {name: value.numpy() for name, value in (found | parts).items() if isinstance(value, torch.Tensor)}
