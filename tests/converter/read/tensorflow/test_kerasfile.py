"""A ``.keras`` file is checked before Keras loads it: layers that would run code or open files are rejected."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from bf16kit.messages.errors import ConversionError, SourceError, UsageError
from converter.read.tensorflow.environment import Environment
from converter.read.tensorflow.kerasfile import check, check_version

_OWN = {"module": "keras.layers", "class_name": "Dense", "config": {"name": "d"}, "registered_name": None}


def _model(*layers: Any) -> dict[str, Any]:
    return {
        "module": "keras.src.models.functional",
        "class_name": "Functional",
        "config": {"name": "m", "layers": list(layers)},
        "registered_name": "Functional",
    }


def _file(path: Path, config: Any, *, compression: int = zipfile.ZIP_STORED, weights: bytes = b"\x89HDF") -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", config if isinstance(config, str) else json.dumps(config))
        archive.writestr("model.weights.h5", weights)
    return path


def _layer(**changed: Any) -> dict[str, Any]:
    return {**_OWN, **changed}


def _function(called: Any, **changed: Any) -> dict[str, Any]:
    return _layer(**{"module": "keras.activations", "class_name": "function", "config": called, **changed})


def test_functions_of_keras_are_accepted(tmp_path: Path) -> None:
    check(_file(tmp_path / "m.keras", _model(_function("relu"), _function("silu", module="keras.src.activations"))))
    check(_file(tmp_path / "m.keras", _model(_function("mean_squared_error", module="keras.losses"))))


@pytest.mark.parametrize("before", [b"\x89HDF\r\n\x1a\n" + bytes(504), b"PK\x03\x04" + bytes(508)])
def test_a_zip_behind_another_file_is_rejected(tmp_path: Path, before: bytes) -> None:
    """Keras treats a file called ``.h5`` as HDF5, and loads that without any safety checks."""
    path = _file(tmp_path / "x.h5", _model(_OWN))
    path.write_bytes(before + path.read_bytes())
    with pytest.raises(SourceError, match="has 512 bytes before its first record"):
        check(path)


def test_a_record_with_another_name_in_newer_versions_of_python_is_rejected(tmp_path: Path) -> None:
    """TensorFlow's Python may be newer than this one: 3.12 reads a name from an extra field, and 3.11 does not."""
    path = tmp_path / "m.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps(_model(_OWN)))
        record = zipfile.ZipInfo("model.weights.h5")
        other = struct.pack("<BL", 1, zlib.crc32(b"model.weights.h5")) + b"config.json"
        record.extra = b"up" + struct.pack("<H", len(other)) + other
        archive.writestr(record, json.dumps(_model(_function("get_file", module="keras.utils"))))
    with pytest.raises(SourceError, match="has a second name in the archive"):
        check(path)


@pytest.mark.parametrize(("name", "said"), [("assets/words.txt", "which Keras' own"), ("config.json", "twice")])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_other_files_in_the_archive_are_rejected(tmp_path: Path, name: str, said: str) -> None:
    path = _file(tmp_path / "m.keras", _model(_OWN))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, "{}")
    with pytest.raises(ConversionError, match=f"holds '{name}', {said}"):
        check(path)


@pytest.mark.parametrize("version", [None, "2.15.0", "3.9.0", "3.13.1", "3.13", "unknown"])
def test_an_unsafe_version_of_keras_is_rejected_with_the_oldest_safe_one(version: str | None) -> None:
    found = "no Keras" if version is None else f"Keras {version}"
    with pytest.raises(UsageError, match=rf"^python has {found}, .* 3\.13\.2 or newer.*pip install 'keras>=3\.13\.2'$"):
        check_version(Environment(Path("python"), {"keras": version}, True))


@pytest.mark.parametrize("version", ["3.13.2", "3.14", "3.15.1", "4.0.0", "3.20.0.dev20260101"])
def test_a_keras_that_is_new_enough_is_accepted(version: str) -> None:
    check_version(Environment(Path("python"), {"keras": version}, True))


def test_layers_of_keras_are_accepted_at_any_depth(tmp_path: Path) -> None:
    inner = _layer(
        class_name="Bidirectional",
        config={
            "layer": _OWN,
            "kernel_initializer": {"module": "keras.initializers", "class_name": "Zeros", "registered_name": None},
            "dtype": {"module": "keras", "class_name": "DTypePolicy", "registered_name": None},
            "shape": {"class_name": "__tuple__", "items": [1, 2]},
        },
    )
    check(_file(tmp_path / "m.keras", _model(inner, _layer(module="keras.src.ops.numpy", class_name="GetItem"))))


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (_layer(class_name="Lambda"), "layer 'd' ('Lambda') is code, which is not run"),
        (_layer(class_name="__lambda__"), "'__lambda__') is code"),
        (_layer(class_name="TFSMLayer"), "is a SavedModel elsewhere"),
        (_layer(class_name="StringLookup"), "is a table of words"),
        (_layer(class_name="TextVectorization"), "is a table of words"),
        (_layer(module="os", class_name="system"), "of module 'os' is not one of Keras' own"),
        (_layer(module="builtins", class_name="function"), "of module 'builtins' is not one of Keras' own"),
        (_layer(module="keras.config", class_name="enable_unsafe_deserialization"), "of module 'keras.config'"),
        (_layer(module="keras.utils", class_name="get_file"), "of module 'keras.utils'"),
        (_layer(module="keras.layers.os", class_name="os.system"), "is not one of Keras' own"),
        (_function("utils.get_file", module="keras"), "the function 'utils.get_file' of module 'keras' is not one"),
        (_function("get_file", module="keras.utils"), "the function 'get_file' of module 'keras.utils'"),
        (_function("load_model", module="keras.models"), "the function 'load_model' of module 'keras.models'"),
        (_function("numpy.load", module="keras.ops"), "the function 'numpy.load' of module 'keras.ops'"),
        (_function("relu", registered_name="my_package>relu"), "the function 'relu' of module 'keras.activations'"),
        (_function({"name": "relu"}), "is not one of Keras' own activations"),
        (_layer(class_name="__typespec__", module="keras", spec_name="utils.get_file"), "is a type of TensorFlow's"),
        (_layer(module="kerasx.layers"), "of module 'kerasx.layers'"),
        (_layer(module=None), "is not one of Keras' own"),
        (_layer(registered_name="my_package>Thing"), "is not one of Keras' own"),
    ],
)
def test_layers_and_functions_that_are_not_of_keras_are_rejected_with_the_remedy(
    tmp_path: Path, layer: dict[str, Any], said: str
) -> None:
    nested = _layer(class_name="Bidirectional", config={"layer": [{"deep": layer}]})
    with pytest.raises(ConversionError) as refused:
        check(_file(tmp_path / "m.keras", _model(_OWN, nested)))
    assert said in str(refused.value)
    assert "convert the directory that model.export(directory) writes" in str(refused.value)


@pytest.mark.parametrize("config", ["no json", "[" * 200_000, "{}x", '"\\ud800'])
def test_an_invalid_config_is_rejected(tmp_path: Path, config: str) -> None:
    with pytest.raises(SourceError, match="truncated or damaged: not a Keras model"):
        check(_file(tmp_path / "m.keras", config))


def test_a_class_without_a_name_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="a class is called"):
        check(_file(tmp_path / "m.keras", _model(_layer(class_name=["Dense"]))))


def test_damaged_weights_are_detected_by_their_checksum(tmp_path: Path) -> None:
    path = _file(tmp_path / "m.keras", _model(_OWN), weights=b"w" * 1000)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"w" * 1000, b"w" * 999 + b"v"))
    with pytest.raises(SourceError, match=r"the checksum of model.weights.h5 is wrong"):
        check(path)


def test_a_record_that_would_grow_too_much_is_not_unpacked(tmp_path: Path) -> None:
    path = _file(tmp_path / "m.keras", _model(_OWN), compression=zipfile.ZIP_DEFLATED, weights=bytes(100 << 20))
    with pytest.raises(SourceError, match=r"'model.weights.h5' would grow from \d+ bytes to 104857600"):
        check(path)


def test_a_file_without_a_config_is_rejected(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        archive.writestr("model.weights.h5", b"")
    with pytest.raises(SourceError, match="not a Keras model"):
        check(tmp_path / "m.keras")
