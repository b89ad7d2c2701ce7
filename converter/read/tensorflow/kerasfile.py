"""Checks a ``.keras`` file (Keras 3) before Keras loads it: the file and its layers may name code to run."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import ConversionError, SourceError, UsageError
from bf16kit.messages.wording import quoted
from converter.read.tensorflow.environment import Environment

_LARGEST_CONFIG = 64 << 20  # bytes
_GROWTH = 50  # factor: Keras stores without compression, and weights hardly compress
_SMALL = 1 << 20  # bytes that any record may expand to
_REMEDY = "load it with the code that made it, and convert the directory that model.export(directory) writes"
_PARTS = "layers|models|initializers|activations|regularizers|constraints|optimizers|losses|metrics|dtype_policies|ops"
_MODULE = re.compile(rf"keras|keras(\.src)?\.({_PARTS})(\.\w+)*")
_FUNCTIONS = re.compile(r"keras(\.src)?\.(activations|initializers|losses|metrics|ops)(\.\w+)*")  # Keras' own functions
_MEMBERS = frozenset({"metadata.json", "config.json", "model.weights.h5"})
_UNICODE_PATH = b"up"  # an extra field that Python 3.12 and newer read as a record's name, but 3.11 does not
_OLDEST = (3, 13, 2)  # older `safe_mode`s let code through in several ways (docs/converting.md)
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_CODE = "is code, which is not run"
_REJECTED_CLASSES = {
    "Lambda": _CODE,
    "__typespec__": "is a type of TensorFlow's that Keras would look up by its name",
    "__lambda__": _CODE,
    "TFSMLayer": "is a SavedModel elsewhere",
    "TorchModuleWrapper": "is a torch module; convert that",
    "JaxLayer": "is a JAX function",
    "FlaxLayer": "is a Flax module",
    "StringLookup": "is a table of words, which stays in the client",
    "TextVectorization": "is a table of words, which stays in the client",
    "IntegerLookup": "is a table of numbers, which stays in the client",
    "Hashing": "hashes words, which stays in the client",
    "HashedCrossing": "hashes words, which stays in the client",
}


def check_version(environment: Environment) -> None:
    """Raise :class:`UsageError` if the Keras of ``environment`` is missing, or too old to load untrusted files."""
    version = environment.versions.get("keras")
    match = _VERSION.match(version or "")
    if match is None or tuple(int(part or 0) for part in match.groups()) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(
            f"{environment.python} has {'no Keras' if version is None else f'Keras {version}'}, and a .keras file is"
            f" loaded with Keras {oldest} or newer, which does not run what such files may hold: pip install"
            f" 'keras>={oldest}'"
        )


def check(path: Path) -> None:
    """Reject what Keras could be made to run or to open.

    Raises :class:`SourceError` for a damaged file, and :class:`ConversionError` naming the layer for code, for layers
    that are not Keras' own, and for layers that ONNX cannot express.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_records(path, archive.infolist())
            config = json.loads(archive.read("config.json"))
            broken = archive.testzip()
    except (OSError, KeyError, ValueError, EOFError, RecursionError, RuntimeError, zlib.error, zipfile.BadZipFile):
        raise SourceError(f"{path}: truncated or damaged: not a Keras model") from None
    if broken is not None:
        raise SourceError(f"{path}: truncated or damaged: the checksum of {broken} is wrong")
    _check_objects(path, config)


def _check_records(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    """Allow only Keras' own records, each once, starting at byte 0.

    Bytes before them may be a file of another format.
    """
    first = min((entry.header_offset for entry in entries), default=0)
    if first:
        raise SourceError(f"{path}: has {first} bytes before its first record, and a file that Keras wrote has none")
    names = set[str]()
    for entry in entries:
        if entry.filename not in _MEMBERS or entry.filename in names:
            what = "twice" if entry.filename in names else "which Keras' own layers do not need"
            raise ConversionError(f"{path}: holds {quoted(entry.filename)}, {what}; {_REMEDY}")
        names.add(entry.filename)
        if entry.filename != entry.orig_filename or _UNICODE_PATH in entry.extra:
            raise SourceError(f"{path}: {quoted(entry.filename)} has a second name in the archive; Keras writes one")
        _check_size(path, entry)


def _check_size(path: Path, entry: zipfile.ZipInfo) -> None:
    if entry.filename == "config.json" and entry.file_size > _LARGEST_CONFIG:
        raise SourceError(f"{path}: its config.json is {entry.file_size} bytes; the limit is {_LARGEST_CONFIG}")
    if entry.file_size > max(_SMALL, _GROWTH * entry.compress_size):
        raise SourceError(
            f"{path}: {quoted(entry.filename)} would grow from {entry.compress_size} bytes to {entry.file_size}; Keras"
            " does not write such files"
        )


def _check_objects(path: Path, config: Any) -> None:
    """Check every object that the config makes Keras create, at any depth."""
    waiting = [config]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            if "class_name" in found:
                _check_object(path, found)
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found


def _check_object(path: Path, found: dict[str, Any]) -> None:
    name, module, registered = (found.get(key) for key in ("class_name", "module", "registered_name"))
    inner = found.get("config")
    called = inner.get("name") if isinstance(inner, dict) else None
    what = f"{path}: layer {quoted(str(called))} ({quoted(str(name))})" if called else f"{path}: {quoted(str(name))}"
    if not isinstance(name, str):
        raise SourceError(f"{path}: truncated or damaged: a class is called {quoted(str(name))}")
    if name in _REJECTED_CLASSES:
        raise ConversionError(f"{what} {_REJECTED_CLASSES[name]}; {_REMEDY}")
    if name.startswith("__") and module is None:
        return  # a tuple, an array or bytes, which Keras writes in this form
    if name == "function":
        _check_function(path, module, inner, registered)
        return
    own = isinstance(module, str) and _MODULE.fullmatch(module) and name.isidentifier()
    if not own or (isinstance(registered, str) and ">" in registered and not registered.startswith("keras")):
        of = "" if module is None else f" of module {quoted(str(module))}"
        raise ConversionError(f"{what}{of} is not one of Keras' own, and its code is not in the file; {_REMEDY}")


def _check_function(path: Path, module: Any, name: Any, registered: Any) -> None:
    """Check a function, which ``config`` names, by its module.

    A name alone is not safe: ``utils.get_file`` of the module ``keras`` opens files.
    """
    own = isinstance(module, str) and _FUNCTIONS.fullmatch(module)
    if not own or not isinstance(name, str) or not name.isidentifier() or registered not in (None, name):
        raise ConversionError(
            f"{path}: the function {quoted(str(name))} of module {quoted(str(module))} is not one of Keras' own"
            f" activations, initializers, losses, metrics or operators; {_REMEDY}"
        )
