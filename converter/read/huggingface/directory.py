"""The JSON files of a Hugging Face directory; its weights are only located here, not read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import SourceError
from converter.read import safetensors_file, torch_file
from converter.read.detect import Kind
from converter.source import Array

_PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")  # configs inside a config


@dataclass(frozen=True, slots=True)
class SentenceModule:
    """One sentence-transformers module after the transformer, as listed in ``modules.json``."""

    kind: str  # Pooling, Normalize, Dense
    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """The prefix of its tensors' names beside the transformer's."""
        return f"{self.path.name}."


@dataclass(frozen=True, slots=True)
class Directory:
    """A model directory: ``path`` holds the transformer, ``files`` is every JSON file that shapes the model.

    ``parts`` is None if the directory is not a sentence-transformers one.
    """

    path: Path
    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    parts: tuple[SentenceModule, ...] | None
    files: tuple[Path, ...]

    @classmethod
    def open(cls, path: Path) -> Directory:
        """Open the directory at ``path``; :class:`SourceError` names a file that is missing or not valid."""
        listing = path / "modules.json"
        files = [listing] if listing.is_file() else []
        root, parts = (path, None) if not files else _parts(path, listing)
        files += [part.path / "config.json" for part in parts or () if part.config]
        config = _json(root / "config.json")
        if "model_type" not in config:
            raise SourceError(f"{root / 'config.json'}: has no model_type, so this is not a transformers model")
        preprocessor, tokenizer = (
            _optional(root / "preprocessor_config.json"),
            _optional(root / "tokenizer_config.json"),
        )
        return cls(root, config, preprocessor, tokenizer, parts, (root / "config.json", *files))

    def setting(self, name: str) -> Any:
        """Return ``name`` from config.json, or from its part for the text, image or audio model; else None."""
        for config in (self.config, *(self.config.get(part) for part in _PARTS)):
            if isinstance(config, Mapping) and config.get(name) is not None:
                return config[name]
        return None


def weights(path: Path) -> tuple[dict[str, Array], list[Path]]:
    """Return every tensor of the checkpoint in the directory ``path``, and the files that hold them."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return safetensors_file.read_file(single), [single]
    if index.is_file():
        return safetensors_file.read_sharded(index)
    pickled = path / "pytorch_model.bin"
    if pickled.is_file():
        return torch_file.read_file(pickled, Kind.TORCH_ZIP, trust_code=False)[0], [pickled]
    raise SourceError(f"{path}: has a config.json, but neither model.safetensors, its index, nor pytorch_model.bin")


def _parts(path: Path, listing: Path) -> tuple[Path, tuple[SentenceModule, ...]]:
    """Return the transformer's directory and the modules after it."""
    entries = _load(listing)
    if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
        raise SourceError(f"{listing}: is not a list of modules, each with a type and a path")
    transformers, *others = entries or [{"type": "", "path": ""}]
    if transformers["type"].rpartition(".")[2] != "Transformer":
        raise SourceError(
            f"{listing}: its first module is a {transformers['type'] or 'nothing'}; only directories that begin with a"
            " Transformer are converted"
        )
    parts = [
        SentenceModule(entry["type"].rpartition(".")[2], _inside(path, listing, entry["path"])) for entry in others
    ]
    root = _inside(path, listing, transformers["path"])
    return root, tuple(SentenceModule(part.kind, part.path, _optional(part.path / "config.json")) for part in parts)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path"), str)


def _inside(path: Path, listing: Path, name: str) -> Path:
    if name and (Path(name).name != name or name == ".."):
        raise SourceError(f"{listing}: the module path {name!r} is not a plain name; modules lie inside the directory")
    return path / name


def _optional(path: Path) -> Mapping[str, Any]:
    return _json(path) if path.is_file() else {}


def _json(path: Path) -> Mapping[str, Any]:
    found = _load(path)
    if not isinstance(found, dict):
        if path.name == "config.json":
            raise SourceError(f"{path}: has no model_type, so this is not a transformers model")
        raise SourceError(f"{path}: not a JSON object")
    return found


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON: {error}") from None
