"""Formats that are not converted are rejected by name with a remedy; files that only look like them are not."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import graphs
from bf16kit.messages.errors import SourceError
from converter.read.detect import Kind, recognise
from converter.read.foreign import FORMATS

Make = Callable[[Path], object]


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("model_config.yaml"), io.BytesIO())


def _zip(*names: str) -> Make:
    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, b"")

    return make


def _bytes(content: bytes) -> Make:
    return lambda path: path.write_bytes(content)


def _directory(*names: str, **documents: object) -> Make:
    """Return a maker of a directory of empty files ``names`` and JSON ``documents``, keyed by name without .json."""

    def make(path: Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).touch()
        path.mkdir(exist_ok=True)
        for name, content in documents.items():
            (path / f"{name}.json").write_text(json.dumps(content))

    return make


_ENGINE = b'{"task": "detect"}'
_GPTQ = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
_MLX = {"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}}

_FOREIGN: dict[str, tuple[Make, str, str]] = {
    "m.gguf": (_bytes(b"GGUF\x03\0\0\0" + bytes(64)), "a GGUF file", "a Hugging Face directory"),
    "m.ggml": (_bytes(b"tjgg\x03\0\0\0"), "a GGML file", "convert the fp32 checkpoint"),
    "m.plan": (_bytes(b"ftrt" + bytes(64)), "a TensorRT engine", "ONNX file it was built from"),
    "m.engine": (
        _bytes(len(_ENGINE).to_bytes(4, "little") + _ENGINE + b"ftrt" + bytes(64)),
        "a TensorRT engine",
        "ONNX file it was built from",
    ),
    "m.mlmodel": (_bytes(b"\x08\x04\x12\x00"), "a Core ML model", "coremltools"),
    "m.mlpackage": (
        _directory("Manifest.json", "Data/com.apple.CoreML/model.mlmodel"),
        "a Core ML package",
        "coremltools",
    ),
    "m.mlmodelc": (_directory("coremldata.bin"), "a compiled Core ML model", "fp32 checkpoint"),
    "m.npy": (lambda path: np.save(path, np.ones(3)), "a numpy array", "save the arrays as safetensors"),
    "m.npz": (_zip("w.npy", "b.npy"), "an archive of numpy arrays", "save the arrays as safetensors"),
    "m.h5": (_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64)), "an HDF5 file", "model.export"),
    "m.ckpt.index": (_bytes(bytes(48)), "a TensorFlow checkpoint", "tf.saved_model.save"),
    "saved_model.pb": (
        _bytes(b"\x08\x01\x12\x00"),
        "the graph of a TensorFlow SavedModel",
        "directory that it lies in",
    ),
    "tf1": (
        _directory("checkpoint", "m-1.index", "m-1.data-00000-of-00001"),
        "a TensorFlow checkpoint",
        "tf.saved_model.save",
    ),
    "frozen.pb": (_bytes(b"\x0a\x07\x0a\x05input"), "a frozen TensorFlow graph", "--graphdef"),
    "model.json": (_bytes(b'{"modelTopology": {}, "weightsManifest": []}'), "a TensorFlow.js model", "SavedModel"),
    "paddle": (_directory("inference.pdmodel", "inference.pdiparams"), "a PaddlePaddle model", "paddle2onnx"),
    "paddle weights": (_directory("m.pdparams"), "a PaddlePaddle model", "paddle2onnx"),
    "m.params": (_bytes((0x112).to_bytes(8, "little") + bytes(16)), "an MXNet parameter file", "ONNX"),
    "m-symbol.json": (_bytes(b'{"nodes": [], "arg_nodes": [], "heads": []}'), "an MXNet graph", "ONNX"),
    "m.xml": (_bytes(b'<?xml version="1.0"?>\n<net name="m">'), "OpenVINO's", "given to OpenVINO"),
    "m.param": (_bytes(b"7767517\n75 83\n"), "an ncnn graph", "ONNX"),
    "m.ort": (_bytes(b"\x20\0\0\0ORTM" + bytes(32)), "an ONNX Runtime format model", ".onnx file"),
    "m.tflite": (_bytes(b"\x1c\0\0\0TFL3" + bytes(32)), "a TensorFlow Lite model", "tf2onnx.convert --tflite"),
    "m.pte": (_bytes(b"\x20\0\0\0ET12" + bytes(32)), "an ExecuTorch program", "torch.export"),
    "m.ptl": (_zip("m/data.pkl", "m/constants.pkl", "m/bytecode.pkl"), "a PyTorch Mobile model", "TorchScript"),
    "flat.ptl": (_bytes(b"\x20\0\0\0PTMF" + bytes(32)), "a PyTorch Mobile model", "TorchScript"),
    "m.nemo": (_tar, "a packed archive", "unpack it"),
    "m.gz": (_bytes(b"\x1f\x8b\x08\0" + bytes(16)), "a packed archive", "unpack it"),
    "m.bz2": (_bytes(b"BZh91AY&SY" + bytes(16)), "a packed archive", "unpack it"),
    "adapter": (_directory("adapter_model.safetensors", "adapter_config.json"), "a PEFT adapter", "merge_and_unload"),
    "gptq": (_directory("model.safetensors", config=_GPTQ), "a quantised model", "was quantised from"),
    "awq": (_directory(config={}, quant_config={"w_bit": 4}), "a quantised model", "was quantised from"),
    "mlx": (_directory(config=_MLX), "a quantised model", "was quantised from"),
    "sd": (_directory(model_index={"_class_name": "StableDiffusionPipeline"}), "a diffusers pipeline", "one by one"),
    "fsdp": (_directory(".metadata", "__0_0.distcp"), "a torch.distributed checkpoint", "dcp_to_torch"),
    "shards": (_directory(".metadata", "meta.pt", "a.distcp"), "a Lightning checkpoint", "consolidate_checkpoint"),
    "deepspeed": (_directory("latest", "zero_to_fp32.py"), "a DeepSpeed checkpoint", "zero_to_fp32.py"),
    "trtllm": (_directory("rank0.engine", config={"build_config": {}}), "a TensorRT-LLM engine", "fp32 checkpoint"),
    "mlflow": (_directory("MLmodel", "data/model.pt"), "an MLflow model", "data/"),
}


@pytest.mark.parametrize("name", _FOREIGN)
def test_a_foreign_format_is_rejected_by_name_with_the_remedy(tmp_path: Path, name: str) -> None:
    make, what, remedy = _FOREIGN[name]
    make(tmp_path / name)
    with pytest.raises(SourceError) as refused:
        recognise(tmp_path / name)
    said, _, advice = str(refused.value).partition("; ")
    assert said.startswith(f"{tmp_path / name}: is {what}")
    assert remedy in advice


def test_every_format_of_the_tables_has_a_test_case() -> None:
    known = [one.what for one in FORMATS]
    assert [what for what in known if not any(what.startswith(case) for _, case, _ in _FOREIGN.values())] == []


def test_the_prefix_of_a_tensorflow_checkpoint_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt.index").write_bytes(bytes(48))
    with pytest.raises(SourceError, match="TensorFlow checkpoint"):
        recognise(tmp_path / "model.ckpt")


def test_onnx_is_recognised_whatever_its_name(tmp_path: Path) -> None:
    """It begins with a version, as a Core ML model does, and was once named .pb, as a frozen graph is."""
    for name in ("m", "m.pb", "m.onnx"):
        onnx.save(graphs.mlp(), tmp_path / name, format="protobuf")
        assert recognise(tmp_path / name) is Kind.ONNX


def test_safetensors_are_recognised_whatever_their_length_resembles(tmp_path: Path) -> None:
    """A file with a header of 0x088b1f bytes begins like a gzip file."""
    size = 0x088B1F
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(size)
    (tmp_path / "m").write_bytes(size.to_bytes(8, "little") + header + bytes(4))
    assert recognise(tmp_path / "m") is Kind.SAFETENSORS


def test_a_model_directory_may_have_files_of_trainers_and_exporters(tmp_path: Path) -> None:
    _directory("zero_to_fp32.py", "tf_model.h5", "model.pdparams", config={"model_type": "bert"})(tmp_path / "m")
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "m" / "model.safetensors")
    assert recognise(tmp_path / "m") is Kind.HUGGING_FACE


@pytest.mark.parametrize("content", ["{not json", "[]", '{"quantization_config": null}', '{"quantization": "none"}'])
def test_a_config_without_quantisation_is_left_to_its_reader(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert recognise(tmp_path) is Kind.HUGGING_FACE


@given(
    beginning=st.sampled_from([*(magic for one in FORMATS for magic in one.magics), b"\x08\x04", b"\x20\0\0\0"]),
    rest=st.binary(max_size=600),
)
def test_any_file_content_gives_a_kind_or_a_source_error(
    tmp_path_factory: pytest.TempPathFactory, beginning: bytes, rest: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(beginning + rest)
    with contextlib.suppress(SourceError):
        assert isinstance(recognise(path), Kind)
