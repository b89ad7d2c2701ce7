"""Formats that users try but that are not converted: recognised by first bytes and names, and rejected with a remedy.

Nothing here runs or unpickles anything. A new format is one line of a table.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path

from bf16kit.messages.errors import NoCheckpoint, SourceError

_BEFORE = "convert the fp32 checkpoint that it was made from"
_TO_ONNX = "export the model to ONNX with its own tools, and convert that"
_CORE_ML = f"{_BEFORE}, the module or SavedModel that was given to coremltools"
_MXNET = f"{_TO_ONNX} (mxnet.onnx.export_model)"
_ARRAYS = "save the arrays as safetensors (safetensors.numpy.save_file), and name the architecture with --model"
_ENGINE = ("a TensorRT engine, compiled for one GPU", f"{_BEFORE}, or the ONNX file it was built from")
_MOBILE = ("a PyTorch Mobile model (.ptl), TorchScript without its code", f"{_BEFORE}, or its TorchScript file")
_ARCHIVE = ("a packed archive (tar, gzip, zstd, xz, bzip2, 7z or rar)", "unpack it, and convert what is in it")
_NO_FLOATS = "its weights are no floating-point numbers that could be rounded: convert the model it was quantised from"
_TF_CHECKPOINT = (
    "a TensorFlow checkpoint (.index and .data files), weights without a graph",
    "restore it in the program that built the model, write a SavedModel (tf.saved_model.save), and convert that",
)


# What "is" is followed by, the remedy, and the bytes, one of which is at an offset (0) in a file of that name (any).
ForeignFile = tuple[str, str, tuple[bytes, ...], int, str]


def _file(what: str, remedy: str, *magics: bytes, at: int = 0, name: str = "*") -> ForeignFile:
    return what, remedy, magics, at, name


FILES: tuple[ForeignFile, ...] = (
    _file("a GGUF file (llama.cpp), mostly quantised", f"{_BEFORE}, a Hugging Face directory", b"GGUF"),
    _file("a GGML file (llama.cpp before GGUF), mostly quantised", _BEFORE, b"lmgg", b"fmgg", b"tjgg"),
    _file(*_ENGINE, b"ftrt", b"ptrt"),
    _file(*_ENGINE, b"{", at=4, name="*.engine"),  # Ultralytics writes JSON and its length before an engine
    _file("a Core ML model (.mlmodel)", _CORE_ML, b"\x08", name="*.mlmodel"),  # protobuf, as ONNX is
    _file("a numpy array (.npy)", _ARRAYS, b"\x93NUMPY"),
    _file(
        "an HDF5 file (.h5), as Keras before version 3 writes whole models and bare weights",
        "load it in Keras and write a SavedModel (model.export('DIRECTORY')), and convert that",
        b"\x89HDF\r\n\x1a\n",
    ),
    _file("an MXNet parameter file (.params)", _MXNET, b"\x12\x01" + bytes(14)),
    _file("an ncnn graph (.param)", f"{_BEFORE}, or the ONNX file between", b"7767517\n"),
    _file(
        "OpenVINO's intermediate representation (.xml with .bin)",
        f"{_BEFORE}, which was given to OpenVINO",
        *(b"<?xml", b"<net ", b"\xef\xbb\xbf<"),
        name="*.xml",
    ),
    _file("an ONNX Runtime format model (.ort)", "convert the .onnx file it was made from", b"ORTM", at=4),
    _file("an ExecuTorch program (.pte)", f"{_BEFORE}, or its torch.export program", b"ET12", at=4),
    _file(*_MOBILE, b"PTMF", at=4),
    _file(
        "a TensorFlow Lite model (.tflite), whose layers are fused and whose weights may be quantised",
        "convert the SavedModel or the .keras file it was made from; where these are lost, make ONNX of it: python -m"
        " tf2onnx.convert --tflite FILE --output MODEL.onnx",
        b"TFL3",
        at=4,
    ),
    _file(
        "the graph of a TensorFlow SavedModel (saved_model.pb) by itself",
        "convert the directory that it lies in, which has its variables, too",
        b"\x08",
        name="saved_model.pb",
    ),
    _file(
        "a frozen TensorFlow graph (GraphDef .pb)",
        "convert the SavedModel it was frozen from, or make ONNX of it: python -m tf2onnx.convert --graphdef FILE",
        b"\x0a",
        name="*.pb",
    ),
    _file(*_TF_CHECKPOINT, b"", name="*.index"),
    _file(*_ARCHIVE, b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"7z\xbc\xaf", b"Rar!\x1a\x07"),
    _file(*_ARCHIVE, b"1AY&SY", at=4),
    _file(*_ARCHIVE, b"ustar", at=257),
)
# The files that such a directory always has, by name or pattern, what it is, and the remedy.
DIRECTORIES = (
    (("Manifest.json", "Data/com.apple.CoreML"), "a Core ML package (.mlpackage)", _CORE_ML),
    (("coremldata.bin",), "a compiled Core ML model (.mlmodelc)", _BEFORE),
    (
        ("model_index.json",),
        "a diffusers pipeline, several models side by side",
        "convert its parts one by one: text_encoder is a Hugging Face directory, others need --model",
    ),
    (("rank0.engine",), "a TensorRT-LLM engine directory, compiled for one GPU", _BEFORE),
)
# The same, but a trainer may also have left these beside a complete Hugging Face model.
TRAINERS_DIRECTORIES = (
    (
        ("meta.pt", ".metadata"),
        "a Lightning checkpoint in shards",
        "make it one file: python -m lightning.pytorch.utilities.consolidate_checkpoint DIRECTORY",
    ),
    (
        ("*.distcp",),
        "a torch.distributed checkpoint (FSDP, .distcp files)",
        "make one file of it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY model.pt",
    ),
    (
        ("zero_to_fp32.py",),
        "a DeepSpeed checkpoint in shards",
        "make it one with its own program: python zero_to_fp32.py . OUTPUT --safe_serialization",
    ),
    (("*.pdiparams",), "a PaddlePaddle model", f"{_TO_ONNX} (paddle2onnx)"),
    (("*.pdparams",), "a PaddlePaddle model", f"{_TO_ONNX} (paddle2onnx)"),
    (("*.data-00000-of-*", "*.index"), *_TF_CHECKPOINT),
    (("MLmodel",), "an MLflow model, a wrapper", "convert what it wraps, below its directory data/ or artifacts/"),
    (
        ("adapter_config.json",),
        "a PEFT adapter, which changes a base model",
        "merge the two, and convert the result: PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload()"
        ".save_pretrained('MERGED')",
    ),
)


def refuse_file(path: Path, head: bytes) -> None:
    """Raise :class:`SourceError` if the file at ``path``, whose first bytes are ``head``, has a foreign format."""
    for what, remedy, magics, at, name in FILES:
        if fnmatch(path.name, name) and head[at:].startswith(magics):
            _refuse(path, what, remedy)


def refuse_zip(path: Path, names: Collection[str]) -> None:
    """Raise :class:`SourceError` if a zip archive with the records ``names`` has a foreign format."""
    records = [name for name in names if name]
    if records and all(name.endswith(".npy") for name in records):
        _refuse(path, "an archive of numpy arrays (.npz)", _ARRAYS)
    if "bytecode.pkl" in names:  # in addition to TorchScript's records
        _refuse(path, *_MOBILE)


def refuse_json(path: Path, fields: object) -> None:
    """Raise :class:`SourceError` if a JSON document has a foreign format."""
    keys = fields.keys() if isinstance(fields, dict) else set[str]()
    if "weightsManifest" in keys or "modelTopology" in keys:
        _refuse(path, "a TensorFlow.js model", f"{_BEFORE}, a SavedModel or a Keras model")
    if keys >= {"nodes", "arg_nodes", "heads"}:
        _refuse(path, "an MXNet graph (-symbol.json)", _MXNET)


def refuse_directory(path: Path) -> None:
    """Raise :class:`SourceError` if the directory ``path`` has a foreign format, or holds quantised weights."""
    whole_model = (path / "config.json").is_file()
    for patterns, what, remedy in DIRECTORIES if whole_model else (*DIRECTORIES, *TRAINERS_DIRECTORIES):
        if all(next(path.glob(pattern), None) is not None for pattern in patterns):
            _refuse(path, what, remedy)
    if _is_quantised(path):
        _refuse(path, "a quantised model", _NO_FLOATS)


def refuse_missing(path: Path) -> None:
    """Raise :class:`SourceError` if ``path`` is the prefix of a TensorFlow 1 checkpoint's file names."""
    if path.with_name(f"{path.name}.index").is_file():
        _refuse(path, *_TF_CHECKPOINT)


def _is_quantised(path: Path) -> bool:
    """Return whether a Hugging Face directory says so: in config.json, or as the first GPTQ and AWQ tools did."""
    if any((path / name).is_file() for name in ("quantize_config.json", "quant_config.json")):
        return True
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # missing or damaged, which the reader reports
        return False
    found = [config.get(key) for key in ("quantization_config", "quantization")] if isinstance(config, dict) else []
    return any(isinstance(value, dict) and value for value in found)


def _refuse(path: Path, what: str, remedy: str) -> None:
    error = NoCheckpoint if remedy is _ARRAYS else SourceError  # among models, arrays are mostly something else
    raise error(f"{path}: is {what}, which is not converted; {remedy}")
