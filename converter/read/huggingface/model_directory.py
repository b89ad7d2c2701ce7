"""The JSON files of a Hugging Face directory, and the tensors of its checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bf16kit.artifact.reading import read_bounded
from bf16kit.converter.read import safetensors_file, torch_file
from bf16kit.converter.read.detect import Kind
from bf16kit.converter.source import Array
from bf16kit.messages.errors import SourceError
from bf16kit.messages.wording import first_few, quoted

INDEX = "model.safetensors.index.json"
_PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")  # configs inside a config
LARGEST = 64 << 20  # bytes of one file; the largest tokenizers today have 35 MB
# Settings of generation, tokenizers, preprocessors (images, sound, video); vocabularies; what licences require.
_COPIED = re.compile(
    r"(generation|tokenizer|processor|preprocessor|image_processor|video_preprocessor|feature_extractor)_config\.json"
    r"|(tokenizer|special_tokens_map|added_tokens|normalizer|chat_template)\.json|[\w-]*vocab[\w-]*\.(json|txt)"
    r"|merges\.txt|bpe\.codes|[\w.-]+\.(model|spm|jinja)|LICENSE(\.txt|\.md)?|NOTICE"
)
# Weights in any framework's format, which are exported; their indexes; and files that no program loads.
_NOT_NEEDED = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|ot|tflite|gguf|index\.json|md|png|jpe?g|gif|svg|pdf)"
    r"|(README|LICENSE|NOTICE|USE_POLICY)(\..*)?|(training_args|optimizer|scheduler)\..*|trainer_state\.json|modules\.json"
    r"|config\.json|\..*"
)
_DTYPES = ("dtype", "torch_dtype")  # transformers 5 reads the first one, and older releases know only the second


class SentenceModule(NamedTuple):
    """One sentence-transformers module after the transformer, as listed in ``modules.json``."""

    kind: str  # Pooling, Normalize, Dense
    path: Path

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
        listing, parts, files = path / "modules.json", None, []
        if listing.is_file():
            (_, path), *others = _modules(listing)
            parts, configs = tuple(others), (part.path / "config.json" for part in others)
            files = [listing, *filter(Path.is_file, configs)]
        config = _load(path / "config.json")
        if "model_type" not in config:
            raise SourceError(f"{path / 'config.json'}: has no model_type, so this is not a transformers model")
        further = (path / f"{name}_config.json" for name in ("preprocessor", "tokenizer"))
        preprocessor, tokenizer = (_load(file) if file.is_file() else {} for file in further)
        return cls(path, config, preprocessor, tokenizer, parts, (path / "config.json", *files))

    def setting(self, name: str) -> Any:
        """Return ``name`` from config.json, or from its part for the text, image or audio model; else None."""
        for config in (self.config, *(self.config.get(part) for part in _PARTS)):
            if isinstance(config, Mapping) and config.get(name) is not None:
                return config[name]
        return None

    def number(self, name: str, otherwise: int) -> int:
        """Return the setting ``name`` if it is an integer, or begins with one."""
        found = self.setting(name)
        found = found[0] if isinstance(found, list) and found else found
        return found if type(found) is int else otherwise

    def tensors(self) -> tuple[dict[str, Array], list[Path]]:
        """Return every tensor of the checkpoint, and the files that describe and hold them, config.json first.

        Tensors of sentence-transformers modules after the transformer are prefixed with their module's directory.
        """
        tensors, files = _weights(self.path)
        for part in (part for part in self.parts or () if part.kind == "Dense"):
            more, found = _weights(part.path)
            tensors |= {part.prefix + name: tensor for name, tensor in more.items()}
            files += found
        return tensors, [*self.files, *files]


def _weights(path: Path) -> tuple[dict[str, Array], list[Path]]:
    """Return every tensor of the checkpoint in the directory ``path``, and the files that hold them."""
    single, index, pickled = (path / name for name in ("model.safetensors", INDEX, "pytorch_model.bin"))
    if single.is_file():
        return safetensors_file.read_file(single), [single]
    if index.is_file():
        return safetensors_file.read_sharded(index)
    if pickled.is_file():
        return torch_file.read_file(pickled, Kind.TORCH_ZIP, trust_code=False)[0], [pickled]
    raise SourceError(f"{path}: has a config.json, but neither model.safetensors, its index, nor pytorch_model.bin")


def _modules(listing: Path) -> list[SentenceModule]:
    """Return the modules that a ``modules.json`` lists, the transformer first."""
    try:
        found = [(each["type"].rpartition(".")[2], Path(each["path"])) for each in _load(listing, list)]
    except (TypeError, KeyError, AttributeError):
        raise SourceError(f"{listing}: is not a list of modules, each with a type and a path") from None
    if not found or found[0][0] != "Transformer":
        raise SourceError(f"{listing}: its first module is not a Transformer; other directories are not converted")
    for _, path in found:
        if path.is_absolute() or len(path.parts) > 1 or ".." in path.parts:
            raise SourceError(f"{listing}: the module path {str(path)!r} is not a plain name inside the directory")
    return [SentenceModule(kind, listing.parent / path) for kind, path in found]


def _load(path: Path, kind: type = dict) -> Any:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, kind):
        raise SourceError(f"{path}: not a JSON {'object' if kind is dict else 'array'}")
    return found


def companions(root: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the files to put beside exported weights of the model in ``root``, and a note on others.

    Its config.json says bfloat16. Raises :class:`SourceError` for a file larger than :data:`LARGEST`, and for a link
    out of the directory.
    """
    names = sorted(entry.name for entry in root.iterdir() if entry.is_file())
    copied = [name for name in names if _COPIED.fullmatch(name)]
    config = json.loads(_content(root, "config.json"), object_hook=_in_bf16) | dict.fromkeys(_DTYPES, "bfloat16")
    found = {"config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}
    left = [quoted(name) for name in names if name not in copied and not _NOT_NEEDED.fullmatch(name)]
    note = f"not copied beside the exported weights: {first_few(left, 10)}; copy those needed to load the model"
    return found | {name: _content(root, name) for name in copied}, [note] if left else []


def _in_bf16(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config``, or a part of it, with bfloat16 if it states a dtype."""
    return config | {key: "bfloat16" for key in _DTYPES if isinstance(config.get(key), str)}


def _content(root: Path, name: str) -> bytes:
    """Return a file inside the directory or, in the Hub's cache, among the model's blobs."""
    real, home = (root / name).resolve(), root.resolve()
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if not any(real.is_relative_to(allowed) for allowed in (home, *blobs)):
        raise SourceError(
            f"{root / name}: a link out of the directory, to {real}; replace the link with the file to export it"
        )
    return read_bounded(root / name, LARGEST, SourceError, "more than any tokenizer or config has")
