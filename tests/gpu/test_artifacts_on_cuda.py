"""Converted models on a GPU: the drift that the converter only emulates on a CPU is measured on the device."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.metrics import DriftSummary, compare
from bf16kit.runtime import Runtime
from bf16kit.runtime.loading import choose_profiles, load, load_reference

pytestmark = pytest.mark.gpu

Convert = Callable[..., Artifact]
Feeds = dict[str, NDArray[Any]]


@pytest.fixture(scope="session")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Return a function that runs ``bf16-convert checkpoint`` on a source and opens the artifact."""

    def run(source: Path, *flags: str) -> Artifact:
        target = tmp_path_factory.mktemp("repository") / source.stem / "1"
        program = str(Path(sys.executable).with_name("bf16-convert"))
        command = [program, "checkpoint", str(source), "--out", str(target), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return Artifact.open(target)

    return run


@pytest.fixture(scope="session")
def bert(convert: Convert, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return a transformer of two layers with random weights."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    import torch

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024
    )
    source = tmp_path_factory.mktemp("bert") / "bert"
    transformers.BertModel(config).save_pretrained(source)
    return convert(source, "--format", "onnx", "--format", "torchscript", "--format", "pt2")


@pytest.fixture(scope="session")
def cnn(convert: Convert, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return convolution, BatchNorm and ReLU, converted from an ONNX file."""
    source = tmp_path_factory.mktemp("cnn") / "cnn.onnx"
    onnx.save(graphs.conv_bn(channels=64), source)
    return convert(source)


def tokens(artifact: Artifact, rows: int, length: int = 16) -> Feeds:
    """Return random token ids for input_ids, ones for the mask, and zeros for all other inputs."""
    ids = np.random.default_rng(rows).integers(1, 1000, (rows, length))
    made = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return {entry.name: made.get(entry.name, np.zeros_like(ids)) for entry in artifact.manifest.inputs}


def assert_within_budget(artifact: Artifact, runtime: Runtime, feeds: Feeds) -> None:
    from bf16kit.drift.budget import Budget

    expected, found = load_reference(artifact).run(feeds), runtime.run(feeds)
    budget = Budget.from_dict(artifact.manifest.budget)
    for spec in runtime.outputs:
        summary = DriftSummary.of(
            compare(expected[spec.name], found[spec.name], spec, artifact.manifest.batch_axis).rows
        )
        assert budget.breaches(spec.name, summary) == []


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_transformers_cuda_profile_is_within_budget(onnx_device: str, bert: Artifact, rows: int) -> None:
    loaded = load(bert, "cuda", device=onnx_device)
    assert (loaded.info.precision, loaded.info.accumulation) == ("bf16", "fp32")
    assert_within_budget(bert, loaded, tokens(bert, rows))


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("profile", ["torchscript", "pt2"])
def test_a_transformers_torch_profiles_are_within_budget(
    torch_device: str, bert: Artifact, rows: int, profile: str
) -> None:
    loaded = load(bert, profile, device=torch_device)
    assert (loaded.info.precision, loaded.info.accumulation) == ("bf16", "fp32")
    assert_within_budget(bert, loaded, tokens(bert, rows))


@pytest.mark.parametrize("rows", [1, 16])
def test_a_convolutions_cuda_profile_is_within_budget(onnx_device: str, cnn: Artifact, rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 3, 8, 8)).astype(np.float32)
    assert_within_budget(cnn, load(cnn, "cuda", device=onnx_device), {"x": x})


def test_the_emulation_predicted_the_drift(onnx_device: str, bert: Artifact) -> None:
    """It is right within a factor of two: the device rounds where the emulation does, but adds in another order."""
    feeds = tokens(bert, 64)
    expected, found = load_reference(bert).run(feeds), load(bert, "cuda", device=onnx_device).run(feeds)
    emulated = bert.manifest.drift["cuda"]
    assert emulated.emulated
    for entry in bert.manifest.outputs:
        summary = DriftSummary.of(
            compare(expected[entry.name], found[entry.name], entry.spec(), bert.manifest.batch_axis).rows
        )
        predicted = emulated.outputs[entry.name]["relative_l2"]["mean"]
        assert 0.5 * predicted < (summary.judged("relative_l2") or 0) < 2 * predicted


def test_auto_chooses_the_gpu(onnx_device: str, bert: Artifact) -> None:
    assert choose_profiles(bert, "auto", "auto") == (("cuda",), onnx_device)
