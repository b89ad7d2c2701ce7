"""A description of each foreign format for users, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A format that is recognised and rejected. ``what`` follows "is", ``remedy`` follows a semicolon.

    ``may_hold_weights``: it may hold a model's weights, but a file of this format beside models is mostly something
    else.
    """

    what: str
    remedy: str
    may_hold_weights: bool = False


_BEFORE = "convert the fp32 checkpoint that it was made from"
_WEIGHTS_ONLY = "save the arrays as safetensors (safetensors.numpy.save_file), and name the architecture with --model"
_TO_ONNX = "export the model to ONNX with its own tools, and convert that"

TABLE: Mapping[str, ForeignFormat] = {
    # files
    "gguf": ForeignFormat(
        "a GGUF file (llama.cpp), whose weights are mostly quantised", f"{_BEFORE}, a Hugging Face directory"
    ),
    "ggml": ForeignFormat("a GGML file (llama.cpp before GGUF), whose weights are mostly quantised", _BEFORE),
    "tensorrt": ForeignFormat(
        "a TensorRT engine (.engine, .plan), compiled for one GPU", f"{_BEFORE}, or the ONNX file it was built from"
    ),
    "coreml": ForeignFormat(
        "a Core ML model (.mlmodel)", f"{_BEFORE}, the module or SavedModel that was given to coremltools"
    ),
    "numpy": ForeignFormat("a numpy array (.npy)", _WEIGHTS_ONLY, may_hold_weights=True),
    "hdf5": ForeignFormat(
        "an HDF5 file (.h5), as Keras before version 3 writes whole models and bare weights",
        "load it in Keras and write a SavedModel (model.export('DIRECTORY')), and convert that",
    ),
    "ort": ForeignFormat("an ONNX Runtime format model (.ort)", "convert the .onnx file that it was made from"),
    "executorch": ForeignFormat("an ExecuTorch program (.pte)", f"{_BEFORE}, or its torch.export program"),
    "mobile": ForeignFormat(
        "a PyTorch Mobile model (.ptl), TorchScript without its code", f"{_BEFORE}, or its TorchScript file"
    ),
    "mxnet": ForeignFormat("an MXNet parameter file (.params)", f"{_TO_ONNX} (mxnet.onnx.export_model)"),
    "mxnet graph": ForeignFormat("an MXNet graph (-symbol.json)", f"{_TO_ONNX} (mxnet.onnx.export_model)"),
    "openvino": ForeignFormat(
        "OpenVINO's intermediate representation (.xml with .bin)", f"{_BEFORE}, which was given to OpenVINO"
    ),
    "ncnn": ForeignFormat("an ncnn graph (.param)", f"{_BEFORE}, or the ONNX file between"),
    "tflite": ForeignFormat(
        "a TensorFlow Lite model (.tflite), whose layers are fused and whose weights may be quantised",
        "convert the SavedModel or the .keras file it was made from; where these are lost, make ONNX of it: python -m"
        " tf2onnx.convert --tflite FILE --output MODEL.onnx",
    ),
    "saved model graph": ForeignFormat(
        "the graph of a TensorFlow SavedModel (saved_model.pb) by itself",
        "convert the directory that it lies in, which has its variables, too",
    ),
    "tensorflow graph": ForeignFormat(
        "a frozen TensorFlow graph (GraphDef .pb)",
        "convert the SavedModel it was frozen from, or make ONNX of it: python -m tf2onnx.convert --graphdef FILE",
    ),
    "tensorflow checkpoint": ForeignFormat(
        "a TensorFlow checkpoint (.index and .data files), weights without a graph",
        "restore it in the program that built the model, write a SavedModel (tf.saved_model.save), and convert that",
    ),
    "archive": ForeignFormat(
        "a packed archive (tar, gzip, zstd, xz, bzip2, 7z or rar)", "unpack it, and convert what is in it"
    ),
    # zip archives and JSON
    "npz": ForeignFormat("an archive of numpy arrays (.npz)", _WEIGHTS_ONLY, may_hold_weights=True),
    "tensorflow.js": ForeignFormat("a TensorFlow.js model", f"{_BEFORE}, a SavedModel or a Keras model"),
    # directories
    "coreml package": ForeignFormat(
        "a Core ML package (.mlpackage)", f"{_BEFORE}, the module or SavedModel that was given to coremltools"
    ),
    "coreml compiled": ForeignFormat("a compiled Core ML model (.mlmodelc)", _BEFORE),
    "adapter": ForeignFormat(
        "a PEFT adapter, which changes a base model",
        "merge the two, and convert the result: PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload()"
        ".save_pretrained('MERGED')",
    ),
    "quantised": ForeignFormat(
        "a quantised model",
        "its weights are no floating-point numbers that could be rounded: convert the model it was quantised from",
    ),
    "diffusers": ForeignFormat(
        "a diffusers pipeline, several models side by side",
        "convert its parts one by one: text_encoder is a Hugging Face directory, others need --model",
    ),
    "distributed": ForeignFormat(
        "a torch.distributed checkpoint (FSDP, .distcp files)",
        "make one file of it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY model.pt",
    ),
    "lightning shards": ForeignFormat(
        "a Lightning checkpoint in shards",
        "make it one file: python -m lightning.pytorch.utilities.consolidate_checkpoint DIRECTORY",
    ),
    "deepspeed": ForeignFormat(
        "a DeepSpeed checkpoint in shards",
        "make it one with its own program (python zero_to_fp32.py . OUTPUT --safe_serialization), or with"
        " lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict",
    ),
    "paddle": ForeignFormat("a PaddlePaddle model", f"{_TO_ONNX} (paddle2onnx)"),
    "trtllm": ForeignFormat("a TensorRT-LLM engine directory, compiled for one GPU", _BEFORE),
    "mlflow": ForeignFormat(
        "an MLflow model, a wrapper", "convert what it wraps, below its directory data/ or artifacts/"
    ),
}
