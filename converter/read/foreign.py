"""Formats that users try but that are not converted: recognised by first bytes and names, and rejected with a remedy.

Nothing here runs or unpickles anything. A new format is one entry of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from bf16kit.messages.errors import NoCheckpoint, SourceError

_BEFORE = "convert the fp32 checkpoint that it was made from"
_CORE_ML = f"{_BEFORE}, the module or SavedModel that was given to coremltools"
_ARRAYS = "save the arrays as safetensors (safetensors.numpy.save_file), and name the architecture with --model"
_ARCHIVE = ("a packed archive (tar, gzip, zstd, xz, bzip2, 7z or rar)", "unpack it, and convert what is in it")
_TF_CHECKPOINT = (
    "a TensorFlow checkpoint (.index and .data files), weights without a graph",
    "restore it in the program that built the model, write a SavedModel (tf.saved_model.save), and convert that",
)
_HDF5 = "load it in Keras and write a SavedModel (model.export('DIRECTORY')), and convert that"
_CONSOLIDATE = "make it one file: python -m lightning.pytorch.utilities.consolidate_checkpoint DIRECTORY"
_TO_TORCH = "make one file of it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY model.pt"
_PARTS = "convert its parts one by one: text_encoder is a Hugging Face directory, others need --model"
_ZERO = "make it one with its own program: python zero_to_fp32.py . OUTPUT --safe_serialization"
_MERGE = (
    "merge the two, and convert the result: PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload()"
    ".save_pretrained('MERGED')"
)
_TFLITE = (
    "convert the SavedModel or the .keras file it was made from; where these are lost, make ONNX of it: python -m"
    " tf2onnx.convert --tflite FILE --output MODEL.onnx"
)
_FROZEN = "convert the SavedModel it was frozen from, or make ONNX of it: python -m tf2onnx.convert --graphdef FILE"


class Foreign(NamedTuple):
    """What "is" is followed by, what to do instead, and how it is recognised: by ``magics`` and name, or ``inside``.

    Those are bytes at an offset of a file; or names in a directory or archive, or keys of JSON, all of which it has.
    """

    what: str
    remedy: str
    magics: tuple[bytes, ...] = ()
    at: int = 0
    name: str = "*"
    inside: tuple[str, ...] = ()


FORMATS: tuple[Foreign, ...] = (
    Foreign("a GGUF file (llama.cpp), mostly quantised", f"{_BEFORE}, a Hugging Face directory", (b"GGUF",)),
    Foreign("a TensorRT engine, compiled for one GPU", f"{_BEFORE}, or its ONNX file", (b"ftrt", b"ptrt")),
    Foreign("a Core ML model (.mlmodel)", _CORE_ML, (b"\x08",), name="*.mlmodel"),  # protobuf, as ONNX is
    Foreign("a numpy array (.npy)", _ARRAYS, (b"\x93NUMPY",)),
    Foreign("an HDF5 file (.h5), as of Keras before version 3", _HDF5, (b"\x89HDF\r\n\x1a\n",)),
    Foreign("an OpenVINO model (.xml with .bin)", _BEFORE, (b"<?xml", b"<net ", b"\xef\xbb\xbf<"), name="*.xml"),
    Foreign("an ONNX Runtime format model (.ort)", "convert the .onnx file it was made from", (b"ORTM",), at=4),
    Foreign("an ExecuTorch program (.pte)", f"{_BEFORE}, or its torch.export program", (b"ET12",), at=4),
    Foreign("a TensorFlow Lite model (.tflite), fused and perhaps quantised", _TFLITE, (b"TFL3",), at=4),
    Foreign("the graph of a TensorFlow SavedModel", "convert its directory", (b"\x08",), name="saved_model.pb"),
    Foreign("a frozen TensorFlow graph (GraphDef .pb)", _FROZEN, (b"\x0a",), name="*.pb"),
    Foreign(*_TF_CHECKPOINT, (b"",), name="*.index"),
    Foreign(*_ARCHIVE, (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"7z\xbc\xaf", b"Rar!\x1a\x07")),
    Foreign(*_ARCHIVE, (b"1AY&SY",), at=4),
    Foreign(*_ARCHIVE, (b"ustar",), at=257),
    Foreign("a PyTorch Mobile model (.ptl)", f"{_BEFORE}, or its TorchScript file", inside=("bytecode.pkl",)),
    Foreign("an archive of numpy arrays (.npz)", _ARRAYS, inside=("*.npy",)),
    Foreign("a TensorFlow.js model", f"{_BEFORE}, a SavedModel or a Keras model", inside=("weightsManifest",)),
    Foreign("a Core ML package (.mlpackage)", _CORE_ML, inside=("Manifest.json", "Data/com.apple.CoreML")),
    Foreign("a compiled Core ML model (.mlmodelc)", _BEFORE, inside=("coremldata.bin",)),
    Foreign("a diffusers pipeline, several models side by side", _PARTS, inside=("model_index.json",)),
    Foreign("a Lightning checkpoint in shards", _CONSOLIDATE, inside=("meta.pt", ".metadata")),
    Foreign("a torch.distributed checkpoint (FSDP, .distcp files)", _TO_TORCH, inside=("*.distcp",)),
    Foreign("a DeepSpeed checkpoint in shards", _ZERO, inside=("zero_to_fp32.py",)),
    Foreign("a PaddlePaddle model", "export it to ONNX (paddle2onnx), and convert that", inside=("*.pd*params",)),
    Foreign(*_TF_CHECKPOINT, inside=("*.data-00000-of-*", "*.index")),
    Foreign("an MLflow model", "convert what it wraps, below its directory data/ or artifacts/", inside=("MLmodel",)),
    Foreign("a PEFT adapter, which changes a base model", _MERGE, inside=("adapter_config.json",)),
)
_QUANTISED = Foreign("a quantised model", "its weights cannot be rounded: convert the model it was quantised from")


def refuse_file(path: Path, head: bytes) -> None:
    """Raise :class:`SourceError` if the file at ``path``, whose first bytes are ``head``, has a foreign format."""
    for found in FORMATS:
        if found.magics and fnmatch(path.name, found.name) and head[found.at :].startswith(found.magics):
            _refuse(path, found)


def refuse_inside(path: Path, has: Callable[[str], bool]) -> None:
    """Raise :class:`SourceError` if what is at ``path`` has all names or keys of a foreign format."""
    for found in FORMATS:
        if found.inside and all(map(has, found.inside)):
            _refuse(path, found)


def refuse_directory(path: Path) -> None:
    """Raise :class:`SourceError` if the directory ``path`` has a foreign format, or holds quantised weights."""
    config, weights = (path / "config.json").is_file(), ("*.safetensors", "*.bin")
    if not config or not any(any(path.glob(pattern)) for pattern in weights):  # a trainer leaves files beside a model
        refuse_inside(path, lambda pattern: any(path.glob(pattern)))
    if config and _is_quantised(path):
        _refuse(path, _QUANTISED)


def _is_quantised(path: Path) -> bool:
    """Return whether a Hugging Face directory says so: in config.json, or as the first GPTQ and AWQ tools did."""
    with suppress(OSError, ValueError, RecursionError, AttributeError):  # damaged, which the reader reports
        config = json.loads((path / "config.json").read_bytes())
        found = [config.get(key) for key in ("quantization_config", "quantization")]
        if any(isinstance(value, dict) and value for value in found):
            return True
    return any((path / name).is_file() for name in ("quantize_config.json", "quant_config.json"))


def _refuse(path: Path, found: Foreign) -> None:
    error = NoCheckpoint if found.remedy is _ARRAYS else SourceError  # among models, arrays are mostly something else
    raise error(f"{path}: is {found.what}, which is not converted; {found.remedy}")
