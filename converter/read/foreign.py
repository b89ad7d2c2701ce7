"""Formats that users try but that are not converted: recognised by first bytes and names, and rejected with a remedy.

Nothing here runs or unpickles anything. A new format is one entry of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from bf16kit.messages.errors import NoCheckpoint, SourceError

_BEFORE = "convert the fp32 checkpoint that it was made from"
_TO_ONNX = "export the model to ONNX with its own tools, and convert that"
_CORE_ML = f"{_BEFORE}, the module or SavedModel that was given to coremltools"
_MXNET = f"{_TO_ONNX} (mxnet.onnx.export_model)"
_ARRAYS = "save the arrays as safetensors (safetensors.numpy.save_file), and name the architecture with --model"
_ENGINE = ("a TensorRT engine, compiled for one GPU", f"{_BEFORE}, or the ONNX file it was built from")
_MOBILE = ("a PyTorch Mobile model (.ptl), TorchScript without its code", f"{_BEFORE}, or its TorchScript file")
_ARCHIVE = ("a packed archive (tar, gzip, zstd, xz, bzip2, 7z or rar)", "unpack it, and convert what is in it")
_TF_CHECKPOINT = (
    "a TensorFlow checkpoint (.index and .data files), weights without a graph",
    "restore it in the program that built the model, write a SavedModel (tf.saved_model.save), and convert that",
)
_CONSOLIDATE = "make it one file: python -m lightning.pytorch.utilities.consolidate_checkpoint DIRECTORY"
_TO_TORCH = "make one file of it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY model.pt"
_ZERO = "make it one with its own program: python zero_to_fp32.py . OUTPUT --safe_serialization"
_MERGE = "merge the two, and convert the result: PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload()"
_GIVEN = "convert the SavedModel or the .keras file it was made from; where these are lost, make ONNX of it: python -m"
_FROZEN = "convert the SavedModel it was frozen from, or make ONNX of it: python -m tf2onnx.convert --graphdef FILE"


class Foreign(NamedTuple):
    """What "is" is followed by, what to do instead, and how it is recognised.

    A file has one of ``magics`` at an offset, and a name. A directory, a zip archive or a JSON document has all of
    ``inside``: patterns of names, or keys.
    """

    what: str
    remedy: str
    magics: tuple[bytes, ...] = ()
    at: int = 0
    name: str = "*"
    inside: tuple[str, ...] = ()


FORMATS: tuple[Foreign, ...] = (
    Foreign("a GGUF file (llama.cpp), mostly quantised", f"{_BEFORE}, a Hugging Face directory", (b"GGUF",)),
    Foreign("a GGML file (llama.cpp before GGUF), mostly quantised", _BEFORE, (b"lmgg", b"fmgg", b"tjgg")),
    Foreign(*_ENGINE, (b"ftrt", b"ptrt")),
    Foreign(*_ENGINE, (b"{",), at=4, name="*.engine"),  # Ultralytics writes JSON and its length before an engine
    Foreign("a Core ML model (.mlmodel)", _CORE_ML, (b"\x08",), name="*.mlmodel"),  # protobuf, as ONNX is
    Foreign("a numpy array (.npy)", _ARRAYS, (b"\x93NUMPY",)),
    Foreign(
        "an HDF5 file (.h5), as Keras before version 3 writes whole models and bare weights",
        "load it in Keras and write a SavedModel (model.export('DIRECTORY')), and convert that",
        (b"\x89HDF\r\n\x1a\n",),
    ),
    Foreign("an MXNet parameter file (.params)", _MXNET, (b"\x12\x01" + bytes(14),)),
    Foreign("an ncnn graph (.param)", f"{_BEFORE}, or the ONNX file between", (b"7767517\n",)),
    Foreign(
        "OpenVINO's intermediate representation (.xml with .bin)",
        f"{_BEFORE}, which was given to OpenVINO",
        (b"<?xml", b"<net ", b"\xef\xbb\xbf<"),
        name="*.xml",
    ),
    Foreign("an ONNX Runtime format model (.ort)", "convert the .onnx file it was made from", (b"ORTM",), at=4),
    Foreign("an ExecuTorch program (.pte)", f"{_BEFORE}, or its torch.export program", (b"ET12",), at=4),
    Foreign(*_MOBILE, (b"PTMF",), at=4),
    Foreign(
        "a TensorFlow Lite model (.tflite), whose layers are fused and whose weights may be quantised",
        f"{_GIVEN} tf2onnx.convert --tflite FILE --output MODEL.onnx",
        (b"TFL3",),
        at=4,
    ),
    Foreign(
        "the graph of a TensorFlow SavedModel (saved_model.pb) by itself",
        "convert the directory that it lies in, which has its variables, too",
        (b"\x08",),
        name="saved_model.pb",
    ),
    Foreign("a frozen TensorFlow graph (GraphDef .pb)", _FROZEN, (b"\x0a",), name="*.pb"),
    Foreign(*_TF_CHECKPOINT, (b"",), name="*.index"),
    Foreign(*_ARCHIVE, (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"7z\xbc\xaf", b"Rar!\x1a\x07")),
    Foreign(*_ARCHIVE, (b"1AY&SY",), at=4),
    Foreign(*_ARCHIVE, (b"ustar",), at=257),
    Foreign(*_MOBILE, inside=("bytecode.pkl",)),  # in addition to TorchScript's records
    Foreign("an archive of numpy arrays (.npz)", _ARRAYS, inside=("*.npy",)),
    Foreign("a TensorFlow.js model", f"{_BEFORE}, a SavedModel or a Keras model", inside=("weightsManifest",)),
    Foreign("an MXNet graph (-symbol.json)", _MXNET, inside=("nodes", "arg_nodes", "heads")),
    Foreign("a Core ML package (.mlpackage)", _CORE_ML, inside=("Manifest.json", "Data/com.apple.CoreML")),
    Foreign("a compiled Core ML model (.mlmodelc)", _BEFORE, inside=("coremldata.bin",)),
    Foreign(
        "a diffusers pipeline, several models side by side",
        "convert its parts one by one: text_encoder is a Hugging Face directory, others need --model",
        inside=("model_index.json",),
    ),
    Foreign("a TensorRT-LLM engine directory, compiled for one GPU", _BEFORE, inside=("rank0.engine",)),
    Foreign("a Lightning checkpoint in shards", _CONSOLIDATE, inside=("meta.pt", ".metadata")),
    Foreign("a torch.distributed checkpoint (FSDP, .distcp files)", _TO_TORCH, inside=("*.distcp",)),
    Foreign("a DeepSpeed checkpoint in shards", _ZERO, inside=("zero_to_fp32.py",)),
    Foreign("a PaddlePaddle model", f"{_TO_ONNX} (paddle2onnx)", inside=("*.pd*params",)),
    Foreign(*_TF_CHECKPOINT, inside=("*.data-00000-of-*", "*.index")),
    Foreign(
        "an MLflow model, a wrapper",
        "convert what it wraps, below its directory data/ or artifacts/",
        inside=("MLmodel",),
    ),
    Foreign(
        "a PEFT adapter, which changes a base model",
        f"{_MERGE}.save_pretrained('MERGED')",
        inside=("adapter_config.json",),
    ),
)
_QUANTISED = Foreign(
    "a quantised model",
    "its weights are no floating-point numbers that could be rounded: convert the model it was quantised from",
)


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
    if any((path / name).is_file() for name in ("quantize_config.json", "quant_config.json")):
        return True
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # damaged, which the reader reports
        return False
    found = [config.get(key) for key in ("quantization_config", "quantization")] if isinstance(config, dict) else []
    return any(isinstance(value, dict) and value for value in found)


def _refuse(path: Path, found: Foreign) -> None:
    error = NoCheckpoint if found.remedy is _ARRAYS else SourceError  # among models, arrays are mostly something else
    raise error(f"{path}: is {found.what}, which is not converted; {found.remedy}")
