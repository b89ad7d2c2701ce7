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
from converting import Cli
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import graphs
from bf16kit.messages.errors import SourceError
from converter.read.detect import Kind, recognise
from converter.read.foreign import TABLE
from converter.read.foreign.files import _MAGIC, _varint

Make = Callable[[Path], object]


def _field(number: int, content: bytes) -> bytes:
    """Return a length-delimited protobuf field."""
    return _number(number << 3 | 2) + _number(len(content)) + content


def _number(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("model_config.yaml"), io.BytesIO())


def _npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.ones(3))
    return file.getvalue()


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


_COREML = b"\x08\x04" + _field(2, b"the description") + _field(502, b"an ML program")
_NODE = _field(1, _field(1, b"input") + _field(2, b"Placeholder"))
_ENGINE = b'{"task": "detect"}'
_QUANTISED = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}

_FOREIGN: dict[str, tuple[Make, str, str]] = {
    "gguf": (_bytes(b"GGUF\x03\0\0\0" + bytes(64)), "gguf", "a Hugging Face directory"),
    "ggml": (_bytes(b"tjgg\x03\0\0\0"), "ggml", "convert the fp32 checkpoint"),
    "engine": (_bytes(b"ftrt" + bytes(64)), "tensorrt", "ONNX file it was built from"),
    "engine of ultralytics": (
        _bytes(len(_ENGINE).to_bytes(4, "little") + _ENGINE + b"ftrt" + bytes(64)),
        "tensorrt",
        "ONNX file it was built from",
    ),
    "mlmodel": (_bytes(_COREML), "coreml", "coremltools"),
    "mlpackage": (_directory("Manifest.json", "Data/com.apple.CoreML/model.mlmodel"), "coreml package", "coremltools"),
    "mlmodelc": (_directory("coremldata.bin"), "coreml compiled", "fp32 checkpoint"),
    "npy": (_bytes(_npy()), "numpy", "save the arrays as safetensors"),
    "npz": (
        _zip("w.npy", "b.npy"),
        "npz",
        "save the arrays as safetensors",
    ),
    "h5": (_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64)), "hdf5", "model.export"),
    "tf checkpoint": (_bytes(bytes(40) + (0xDB4775248B80FB57).to_bytes(8, "little")), "tensorflow checkpoint", "graph"),
    "saved_model.pb": (
        _bytes(b"\x08\x01" + _field(2, _field(1, b"a graph of 200 bytes" * 10))),
        "saved model graph",
        "convert the directory that it lies in",
    ),
    "tf directory": (
        _directory("checkpoint", "m-1.index", "m-1.data-00000-of-00001"),
        "tensorflow checkpoint",
        "tf.saved_model.save",
    ),
    "frozen graph": (_bytes(_NODE + _NODE), "tensorflow graph", "--graphdef"),
    "tensorflow.js": (_bytes(b'{"modelTopology": {}, "weightsManifest": []}'), "tensorflow.js", "SavedModel"),
    "paddle": (_directory("inference.pdmodel", "inference.pdiparams"), "paddle", "paddle2onnx"),
    "mxnet": (_bytes((0x112).to_bytes(8, "little") + bytes(16)), "mxnet", "ONNX"),
    "mxnet graph": (_bytes(b'{"nodes": [], "arg_nodes": [], "heads": []}'), "mxnet graph", "ONNX"),
    "openvino": (_bytes(b'<?xml version="1.0"?>\n<net name="m" version="11">'), "openvino", "given to OpenVINO"),
    "ncnn": (_bytes(b"7767517\n75 83\n"), "ncnn", "ONNX"),
    "ort": (_bytes(b"\x20\0\0\0ORTM" + bytes(32)), "ort", ".onnx file"),
    "tflite": (_bytes(b"\x1c\0\0\0TFL3" + bytes(32)), "tflite", "tf2onnx.convert --tflite"),
    "pte": (_bytes(b"\x20\0\0\0ET12" + bytes(32)), "executorch", "torch.export"),
    "ptl": (_zip("m/data.pkl", "m/constants.pkl", "m/bytecode.pkl"), "mobile", "TorchScript"),
    "ptl, flatbuffer": (_bytes(b"\x20\0\0\0PTMF" + bytes(32)), "mobile", "TorchScript"),
    "tar": (_tar, "archive", "unpack it"),
    "gzip": (_bytes(b"\x1f\x8b\x08\0" + bytes(16)), "archive", "unpack it"),
    "bzip2": (_bytes(b"BZh91AY&SY" + bytes(16)), "archive", "unpack it"),
    "adapter": (
        _directory("adapter_model.safetensors", adapter_config={"base_model_name_or_path": "acme/base"}),
        "adapter",
        "merge_and_unload",
    ),
    "gptq": (_directory("model.safetensors", config=_QUANTISED), "quantised", "was quantised from"),
    "awq before transformers had it": (
        _directory(config={"model_type": "llama"}, quant_config={"w_bit": 4, "zero_point": True}),
        "quantised",
        "was quantised from",
    ),
    "mlx": (
        _directory(config={"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}}),
        "quantised",
        "was quantised from",
    ),
    "diffusers": (_directory(model_index={"_class_name": "StableDiffusionPipeline"}), "diffusers", "one by one"),
    "fsdp": (_directory(".metadata", "__0_0.distcp"), "distributed", "dcp_to_torch"),
    "lightning in shards": (
        _directory(".metadata", "meta.pt", "__0_0.distcp"),
        "lightning shards",
        "consolidate_checkpoint",
    ),
    "deepspeed": (_directory("latest", "zero_to_fp32.py"), "deepspeed", "zero_to_fp32.py"),
    "tensorrt-llm": (_directory("rank0.engine", config={"build_config": {}}), "trtllm", "fp32 checkpoint"),
    "mlflow": (_directory("MLmodel", "data/model.pt"), "mlflow", "data/"),
}


@pytest.mark.parametrize("name", _FOREIGN)
def test_a_foreign_format_is_rejected_by_name_with_the_remedy(tmp_path: Path, name: str) -> None:
    make, expected, remedy = _FOREIGN[name]
    make(tmp_path / "model.pt")
    with pytest.raises(SourceError) as refused:
        recognise(tmp_path / "model.pt")
    assert TABLE[expected].what in str(refused.value)
    assert remedy in str(refused.value)


def test_every_format_of_the_table_has_a_test_case() -> None:
    assert {expected for _, expected, _ in _FOREIGN.values()} == set(TABLE)


@pytest.mark.parametrize(("name", "said"), [("gptq", "(gptq, 4 bits)"), ("adapter", "(acme/base)"), ("mlx", "4 bits")])
def test_details_that_a_directory_states_are_in_the_error(tmp_path: Path, name: str, said: str) -> None:
    _FOREIGN[name][0](tmp_path / "m")
    with pytest.raises(SourceError) as refused:
        recognise(tmp_path / "m")
    assert said in str(refused.value)


def test_the_prefix_of_a_tensorflow_checkpoint_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt.index").touch()
    with pytest.raises(SourceError, match="TensorFlow checkpoint"):
        recognise(tmp_path / "model.ckpt")


def test_the_command_exits_with_2_and_leaves_nothing(cli: Cli, tmp_path: Path, target: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0")
    cli("checkpoint", tmp_path / "m.gguf", "--out", target).refused(2, "m.gguf: is a GGUF file", "not converted")
    assert not target.parent.exists()


def test_onnx_is_not_mistaken_for_core_ml(tmp_path: Path) -> None:
    """Both begin with a version. All fields of an ONNX file with hundreds of metadata entries are examined."""
    model = graphs.mlp()
    for index in range(300):
        model.metadata_props.add(key=f"key{index}", value="value")
    onnx.save(model, tmp_path / "m")
    assert recognise(tmp_path / "m") is Kind.ONNX


@pytest.mark.parametrize("cut", range(2, len(_COREML)))
def test_a_truncated_core_ml_file_is_rejected_or_left_to_the_onnx_reader(tmp_path: Path, cut: int) -> None:
    (tmp_path / "m").write_bytes(_COREML[:cut])
    with contextlib.suppress(SourceError):
        assert recognise(tmp_path / "m") is Kind.ONNX  # the ONNX reader reports what is wrong with it


def test_a_length_beyond_the_end_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"\x08\x04\x12" + _number(1 << 64) + b"text")
    assert recognise(tmp_path / "m") is Kind.ONNX


def test_a_varint_without_end_is_none() -> None:
    assert _varint(io.BytesIO(b"\xff" * 100)) is None
    assert _varint(io.BytesIO(b"")) is None
    assert _varint(io.BytesIO(b"\xac\x02")) == 300


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
    beginning=st.sampled_from([*(magic for magic, _ in _MAGIC), b"", b"\x08\x04", b"\x0a\x10", b"\x20\0\0\0"]),
    rest=st.binary(max_size=600),
)
def test_any_file_content_gives_a_kind_or_a_source_error(
    tmp_path_factory: pytest.TempPathFactory, beginning: bytes, rest: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(beginning + rest)
    with contextlib.suppress(SourceError):
        assert isinstance(recognise(path), Kind)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)


@given(
    fields=st.dictionaries(
        st.sampled_from(["quantization_config", "quantization", "quant_method", "bits", "base_model_name_or_path"]),
        _VALUES,
    ),
    file=st.sampled_from(["config.json", "adapter_config.json", "quant_config.json"]),
)
def test_any_config_gives_a_kind_or_a_source_error(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object], file: str
) -> None:
    directory = tmp_path_factory.mktemp("any")
    (directory / file).write_text(json.dumps(fields))
    with contextlib.suppress(SourceError):
        assert isinstance(recognise(directory), Kind)
