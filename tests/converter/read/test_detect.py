"""A source's kind is recognised by its content; what is not converted is rejected by name and leaves no file behind."""

import contextlib
import io
import json
import os
import pickle
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
from bf16kit.converter.read.detect import Kind, recognise
from bf16kit.converter.read.foreign import FORMATS
from bf16kit.messages.errors import SourceError

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


_GPTQ = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
_MLX = {"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}}

_FOREIGN: dict[str, tuple[Make, str, str]] = {
    "m.gguf": (_bytes(b"GGUF\x03\0\0\0" + bytes(64)), "a GGUF file", "a Hugging Face directory"),
    "m.mlmodel": (_bytes(b"\x08\x04\x12\x00"), "a Core ML model", "coremltools"),
    "m.mlpackage": (
        _directory("Manifest.json", "Data/com.apple.CoreML/model.mlmodel"),
        "a Core ML package",
        "coremltools",
    ),
    "m.npz": (_zip("w.npy", "b.npy"), "an archive of numpy arrays", "save the arrays as safetensors"),
    "m.h5": (_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64)), "an HDF5 file", "model.export"),
    "m.ckpt.index": (_bytes(bytes(48)), "a TensorFlow checkpoint", "tf.saved_model.save"),
    "saved_model.pb": (_bytes(b"\x08\x01\x12\x00"), "the graph of a TensorFlow SavedModel", "its directory"),
    "tf1": (_directory("m-1.index", "m-1.data-00000-of-00001"), "a TensorFlow checkpoint", "tf.saved_model.save"),
    "frozen.pb": (_bytes(b"\x0a\x07\x0a\x05input"), "a frozen TensorFlow graph", "--graphdef"),
    "model.json": (_bytes(b'{"modelTopology": {}, "weightsManifest": []}'), "a TensorFlow.js model", "SavedModel"),
    "m.ort": (_bytes(b"\x20\0\0\0ORTM" + bytes(32)), "an ONNX Runtime format model", ".onnx file"),
    "m.ptl": (_zip("m/data.pkl", "m/constants.pkl", "m/bytecode.pkl"), "a PyTorch Mobile model", "TorchScript"),
    "m.nemo": (_tar, "a packed archive", "unpack it"),
    "m.bz2": (_bytes(b"BZh91AY&SY" + bytes(16)), "a packed archive", "unpack it"),
    "adapter": (_directory("adapter_model.safetensors", "adapter_config.json"), "a PEFT adapter", "merge_and_unload"),
    "gptq": (_directory("model.safetensors", config=_GPTQ), "a quantised model", "was quantised from"),
    "awq": (_directory(config={}, quant_config={"w_bit": 4}), "a quantised model", "was quantised from"),
    "mlx": (_directory(config=_MLX), "a quantised model", "was quantised from"),
    "fsdp": (_directory(".metadata", "__0_0.distcp"), "a torch.distributed checkpoint", "dcp_to_torch"),
    "shards": (_directory(".metadata", "meta.pt", "a.distcp"), "a Lightning checkpoint", "consolidate_checkpoint"),
    "deepspeed": (_directory("latest", "zero_to_fp32.py"), "a DeepSpeed checkpoint", "zero_to_fp32.py"),
}


_OWN: dict[str, tuple[Make, Kind]] = {
    "torch": (_zip("archive/data.pkl", "archive/version"), Kind.TORCH_ZIP),
    "script": (_zip("archive/data.pkl", "archive/constants.pkl"), Kind.TORCHSCRIPT),
    "program": (_zip("m/archive_format"), Kind.EXPORTED),
    "keras": (_zip("config.json", "metadata.json", "model.weights.h5"), Kind.KERAS),
    "transformers": (_directory(config={}), Kind.HUGGING_FACE),
    "saved": (_directory("saved_model.pb"), Kind.SAVED_MODEL),
    "m.pt": (lambda path: onnx.save(graphs.mlp(), path, format="protobuf"), Kind.ONNX),
    "m.onnx": (lambda path: save_file({"w": np.ones(3, np.float32)}, path), Kind.SAFETENSORS),
}


@pytest.mark.parametrize("name", _OWN)
def test_a_source_is_recognised_by_its_content_and_takes_a_model_only_if_it_is_weights(
    cli: Cli, tmp_path: Path, target: Path, name: str
) -> None:
    make, kind = _OWN[name]
    make(tmp_path / name)
    assert recognise(tmp_path / name) is kind
    if kind not in (Kind.TORCH_ZIP, Kind.SAFETENSORS):
        said = f"--model: {kind.value} brings its own architecture"
        cli("checkpoint", tmp_path / name, "--out", target, "--model", "architectures:Mlp").refused(2, said)


@pytest.mark.parametrize("name", _FOREIGN)
def test_a_foreign_format_is_rejected_by_name_with_the_remedy(tmp_path: Path, name: str) -> None:
    make, what, remedy = _FOREIGN[name]
    make(tmp_path / name)
    with pytest.raises(SourceError) as refused:
        recognise(tmp_path / name)
    said, _, advice = str(refused.value).partition("; ")
    assert said.startswith(f"{tmp_path / name}: is {what}")
    assert remedy in advice


def test_the_prefix_of_a_tensorflow_checkpoint_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt.index").write_bytes(bytes(48))
    with pytest.raises(SourceError, match="TensorFlow checkpoint"):
        recognise(tmp_path / "model.ckpt")


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


def test_onnx_of_every_ir_version_is_recognised(tmp_path: Path) -> None:
    """The second byte is the version: 10 is a newline, 9 a tab, and the text that follows may be empty."""
    model = graphs.mlp()
    for model.ir_version in range(3, 14):
        for name in ("model.pt", "m.pb"):  # a frozen graph's name, too
            (tmp_path / name).write_bytes(model.SerializeToString())
            assert recognise(tmp_path / name) is Kind.ONNX


def test_bare_pickles_of_every_binary_protocol_are_recognised(tmp_path: Path) -> None:
    for protocol in range(2, 6):
        (tmp_path / "w.bin").write_bytes(pickle.dumps({"a": 1}, protocol=protocol))
        assert recognise(tmp_path / "w.bin") is Kind.PICKLE


def test_a_sharded_checkpoint_is_recognised_by_its_index_and_its_directory(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {}}))
    assert recognise(index) is Kind.SHARDED
    assert recognise(tmp_path) is Kind.SHARDED


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("ein paar Wörter\n".encode(), "is a text file, not a checkpoint"),
        (b"<!doctype html><title>404</title>", "is a text file, not a checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b'{"a": 1}', "is JSON, but not the index"),
        (b"{not json", "is a text file"),
        (b"PK\x03\x04 and nothing more", "truncated or damaged zip"),
        (bytes(range(200, 256)), "first bytes c8 c9 ca"),
        (b"\x00" * 600, "first bytes 00 00"),
    ],
)
def test_files_that_are_not_checkpoints_are_rejected_with_a_description(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(SourceError, match=said):
        recognise(tmp_path / "model.pt")


def test_zips_and_directories_that_are_not_models_are_rejected(tmp_path: Path) -> None:
    _zip("a.jpg")(tmp_path / "photos.zip")
    with pytest.raises(SourceError, match="not one that torch wrote"):
        recognise(tmp_path / "photos.zip")
    with pytest.raises(SourceError, match="is not a model"):
        recognise(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert recognise(tmp_path) is Kind.HUGGING_FACE  # sentence-transformers; its reader reports what is wrong with it


def test_a_pipe_is_rejected_and_not_waited_for(tmp_path: Path) -> None:
    """Opening a pipe without a writer would block forever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="neither a file nor a directory"):
        recognise(tmp_path / "pipe")


def test_a_name_on_the_hub_is_not_taken_for_a_directory(cli: Cli, target: Path) -> None:
    cli("checkpoint", "org/model", "--out", target).refused(2, "first run `hf download org/model --local-dir DIR`")
