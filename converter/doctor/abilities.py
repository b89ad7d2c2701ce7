"""The sources that can be read and the formats that can be written, with the parts that each needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from converter.doctor.parts import Part

_TORCH = ("onnxruntime", "onnxscript", "torch")

# One line each: the name for users, and names from `parts.CHECKS`. A new source or format gets its line here.
SOURCES: Mapping[str, Sequence[str]] = {
    "ONNX": ("onnxruntime", "onnxscript"),
    "Hugging Face directory": (*_TORCH, "transformers"),
    "safetensors": _TORCH,
    "torch state dict": _TORCH,
    "TorchScript": _TORCH,
    "torch.export program (.pt2)": _TORCH,
    "Lightning checkpoint": _TORCH,
    "Orbax (JAX) checkpoint": (*_TORCH, "tensorstore"),
    "Flax msgpack": _TORCH,
    "TensorFlow SavedModel": ("onnxruntime", "onnxscript", "TensorFlow"),
    "Keras model (.keras)": ("onnxruntime", "onnxscript", "TensorFlow"),
}
FORMATS: Mapping[str, Sequence[str]] = {
    "onnx": ("onnxruntime", "onnxscript"),
    "torchscript": _TORCH,
    "pt2": _TORCH,
    "safetensors": ("onnxruntime", "onnxscript"),
    "hf": (*_TORCH, "transformers"),
}
# Other abilities that need a part of their own.
OTHERS: Mapping[str, Sequence[str]] = {
    "bf16-convert recover": _TORCH,
    "a LightningModule as --model": (*_TORCH, "lightning"),
}


@dataclass(frozen=True, slots=True)
class Capability:
    """A source, a format or another ability: whether it is available here, and the parts that are missing."""

    name: str
    possible: bool
    missing: tuple[str, ...]


def capabilities(needs: Mapping[str, Sequence[str]], found: Mapping[str, Part]) -> list[Capability]:
    """Return each line of ``needs``, judged by the parts ``found``."""
    lines = []
    for name, needed in needs.items():
        missing = tuple(part for part in needed if not found[part].found)
        lines.append(Capability(name, not missing, missing))
    return lines
