"""Recognises a source's format by its content, never by its name."""

from __future__ import annotations

import json
import zipfile
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path

from bf16kit.converter.read import foreign, jax
from bf16kit.messages.errors import NoCheckpoint, SourceError


class Kind(Enum):
    """The recognised formats; the value is the name that messages use."""

    SAFETENSORS = "safetensors"
    SHARDED = "sharded safetensors"
    TORCH_ZIP = "a torch checkpoint"
    LIGHTNING = "a Lightning checkpoint"
    PICKLE = "a pickle file"
    HUGGING_FACE = "a Hugging Face directory"
    ONNX = "an ONNX file"
    TORCHSCRIPT = "a TorchScript file"
    EXPORTED = "a torch.export program (.pt2)"
    SAVED_MODEL = "a TensorFlow SavedModel"
    ORBAX = "an Orbax (JAX) checkpoint"
    FLAX = "Flax msgpack"
    KERAS = "a Keras model"
    MODULE = "a torch module in memory"


# zipfile's errors: RuntimeError for an encrypted record and, as NotImplementedError, for an unknown compression
NO_ARCHIVE = (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError)
_SAFETENSORS_HEADER = 100_000_000  # bytes: the safetensors library's own limit
_LIGHTNING_KEY = b"pytorch-lightning_version"  # in the pickle; the reader checks where


def recognise(path: Path) -> Kind:
    """Return the kind of source at ``path``.

    Raises :class:`SourceError` when the path does not exist, when the source is damaged beyond recognition, or when its
    format is known but not converted.
    """
    if not path.exists():
        if path.with_name(f"{path.name}.index").is_file():  # TensorFlow 1 names a checkpoint by a prefix
            return recognise(path.with_name(f"{path.name}.index"))
        on_hub = len(path.parts) == 2 and not path.parent.exists()
        hint = f"; if it is on the Hugging Face Hub, first run `hf download {path} --local-dir DIR`" if on_hub else ""
        raise SourceError(f"{path}: no such file or directory{hint}")
    if not path.is_dir() and not path.is_file():  # reading a pipe may block forever
        raise SourceError(f"{path}: neither a file nor a directory")
    try:
        return _directory_kind(path) if path.is_dir() else _file_kind(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None


def _directory_kind(path: Path) -> Kind:
    foreign.refuse_directory(path)
    if (path / "saved_model.pb").is_file():
        return Kind.SAVED_MODEL
    if jax.is_orbax(path):
        return Kind.ORBAX
    own = [(path / name).is_file() for name in ("manifest.json", "weights.bf16", "measurements.json")]
    if own[0] and any(own[1:]):
        raise SourceError(f"{path}: is a bf16kit artifact already; `bf16-convert restore` gives back its checkpoint")
    if (path / "config.json").is_file() or (path / "modules.json").is_file():
        return Kind.HUGGING_FACE
    if len(list(path.glob("*.safetensors.index.json"))) == 1:
        return Kind.SHARDED
    jax.refuse_several(path)
    raise NoCheckpoint(
        f"{path}: a directory without config.json, *.safetensors.index.json or saved_model.pb is not a model; to"
        " convert all checkpoints in it, pass --out REPOSITORY"
    )


def _file_kind(path: Path) -> Kind:
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise SourceError(f"{path}: is empty")
    is_safetensors = len(head) > 8 and int.from_bytes(head[:8], "little") <= _SAFETENSORS_HEADER and head[8:9] == b"{"
    if not is_safetensors:
        foreign.refuse_file(path, head)
    if head.startswith(b"PK\x03\x04"):
        return _zip_kind(path)
    if head[0] == 0x80 and len(head) > 1 and head[1] in range(2, 6):  # the PROTO opcode that opens a pickle
        return Kind.PICKLE
    if is_safetensors:
        return Kind.SAFETENSORS
    if _may_be_flax(head):
        return Kind.FLAX
    if head.lstrip().startswith(b"{"):
        return _json_kind(path)
    if head[0] == 0x08:  # protobuf field 1, varint: ModelProto.ir_version; no text begins with a backspace
        return Kind.ONNX
    if head.startswith(b"version https://git-lfs"):
        raise SourceError(f"{path}: is a Git LFS pointer, not the file it points to (run `git lfs pull`)")
    text = head.decode(errors="replace").removesuffix("\ufffd")  # the last character may be incomplete
    is_text = all(character.isprintable() or character.isspace() for character in text) and "\ufffd" not in text
    unknown = f"a known checkpoint format (first bytes {head[:8].hex(' ')})"
    raise NoCheckpoint(
        f"{path}: is {'a text file, not a checkpoint' if is_text else f'not {unknown}'}; expected safetensors, torch,"
        " ONNX or a model directory"
    )


def _may_be_flax(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` may be Flax's: a nonempty map whose first key is text."""
    skip = {0xDE: 3, 0xDF: 5}.get(head[0], 1 if 0x81 <= head[0] <= 0x8F else len(head))
    return len(head) > skip and (0xA1 <= head[skip] <= 0xBF or head[skip] in (0xD9, 0xDA, 0xDB))


def _zip_kind(path: Path) -> Kind:
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            stored = (info for info in records if info.compress_type == zipfile.ZIP_STORED)
            pickles = [archive.read(info) for info in stored if info.filename.endswith("/data.pkl")]
    except NO_ARCHIVE:
        raise SourceError(f"{path}: is a truncated or damaged zip archive (of torch or Keras?)") from None
    names = {info.filename for info in records} | {info.filename.partition("/")[2] for info in records}
    own = [name for name in names if "/extra/" not in f"/{name}"]  # TorchScript may hold files of its author there
    foreign.refuse_inside(path, lambda pattern: any(fnmatch(name, pattern) for name in own))
    if "constants.pkl" in names:
        return Kind.TORCHSCRIPT
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return Kind.EXPORTED
    if "data.pkl" in names:
        for info in records:
            if info.compress_type != zipfile.ZIP_STORED:  # torch would map it as it is
                raise SourceError(f"{path}: record {info.filename!r} is compressed, which torch never does")
        return Kind.LIGHTNING if any(_LIGHTNING_KEY in content for content in pickles) else Kind.TORCH_ZIP
    if "model.weights.h5" in names:
        return Kind.KERAS
    raise NoCheckpoint(f"{path}: is a zip archive, but not one that torch wrote")


def _json_kind(path: Path) -> Kind:
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        raise NoCheckpoint(f"{path}: is a text file, not a checkpoint") from None
    if isinstance(fields, dict):
        if isinstance(fields.get("weight_map"), dict):
            return Kind.SHARDED
        foreign.refuse_inside(path, fields.__contains__)
    raise NoCheckpoint(f"{path}: is JSON, but not the index of a sharded checkpoint (it has no weight_map)")
