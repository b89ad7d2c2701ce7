"""Lists what there is to convert in a directory: its checkpoints, each with the name and the options of its model."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bf16kit.messages.errors import NoCheckpoint, SourceError, UsageError
from converter.read.detect import Kind, recognise
from converter.verify.samples import SUFFIXES

# Endings that are removed from a file's name to name its model.
_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("safetensors", "pt", "pth", "bin", "ckpt", "onnx", "pt2", "ts", "torchscript", "msgpack"),
        *("keras", "tflite", "h5", "hdf5", "gguf", "ggml", "pb", "mlmodel", "engine", "plan", "ptl", "pte", "ort"),
    )
)
_INDICES = (".safetensors.index.json", ".index.json")
_WITHOUT_WEIGHTS = frozenset(
    (".txt", ".md", ".json", ".yaml", ".yml", ".npz", ".npy", ".csv", ".log", ".png", ".jpg", ".svg", ".html", ".py")
)
_SHOWN = 5
_LONGEST_NAME = 255  # bytes of a file's name

Configure = Callable[[str, str], "ModelSettings"]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings of one model: its name, arguments of `bf16-convert checkpoint`, and the files that these name."""

    model: str
    arguments: tuple[str, ...]
    referenced: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint. ``files`` hold all its bytes; ``referenced`` are the files and directories its arguments name.

    ``problem`` says why it cannot be read at all; "" if it can.
    """

    model: str
    source: Path
    files: tuple[Path, ...]
    arguments: tuple[str, ...]
    problem: str = ""
    referenced: tuple[Path, ...] = ()

    def digest(self) -> str:
        """Return the sha256 of its arguments, and of names and bytes of its files and of those its arguments name.

        Of code that an argument names, only the name is included, because one file does not determine what a function
        does.
        """
        found = hashlib.sha256(json.dumps(self.arguments).encode())
        for path in self.files:
            found.update(f"\n{_digest(path)}  {path.relative_to(self.source.parent)}".encode())
        for path in (file for each in self.referenced for file in _referenced_files(each)):
            found.update(f"\nnamed {_digest(path)}  {path}".encode())
        return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Worklist:
    """The items to convert, by name; ``skipped`` are other files, each with the reason why it is no checkpoint."""

    items: tuple[Item, ...]
    skipped: tuple[str, ...]


def is_collection(path: Path) -> bool:
    """Whether ``path`` is a directory that is no model itself, so that it may hold many."""
    if not path.is_dir():
        return False
    try:
        recognise(path)
    except NoCheckpoint:
        return True
    except SourceError:
        return False
    return False


def collect(directory: Path, configure: Configure, repository: Path | None = None) -> Worklist:
    """Return the checkpoints directly in ``directory``; ``configure(file name, model)`` returns the settings of each.

    A ``repository`` inside it is ignored. Hidden names and what is no checkpoint are passed over. A checkpoint that is
    damaged, or of a format that is not converted, is listed with the reason. Raises :class:`UsageError` if there is
    none, or if two would have the same name.
    """
    kinds: dict[Path, Kind | str] = {}
    skipped: dict[Path, str] = {}
    shards: set[Path] = set()
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or (repository is not None and path.resolve() == repository.resolve()):
            continue
        try:
            kind = recognise(path)
            shards.update(_shards(path) if kind is Kind.SHARDED else ())
            kinds[path] = kind
        except NoCheckpoint as error:
            skipped[path] = _without_path(error, path)
        except SourceError as error:
            kinds[path] = _without_path(error, path)
    possible_weights = tuple(path for path in skipped if _may_hold_weights(path))
    items = [_item(path, kind, possible_weights, configure) for path, kind in kinds.items() if path not in shards]
    if not items:
        raise UsageError(f"{directory}: holds no checkpoint{_listed(skipped.values())}")
    _check_names(items)
    reasons = (f"{path.name}: {reason}" for path, reason in skipped.items() if path not in _files_of(items))
    return Worklist(tuple(items), tuple(reasons))


def model_name(file: str) -> str:
    """Return the name of the model in ``file``: the file's name without the ending of its format."""
    for ending in _INDICES:
        if file.endswith(ending):
            return file.removesuffix(ending)
    path = Path(file)
    return path.stem if path.suffix.lower() in _SUFFIXES else file


def _item(path: Path, kind: Kind | str, possible_weights: tuple[Path, ...], configure: Configure) -> Item:
    settings = configure(path.name, model_name(path.name))
    problem = kind if isinstance(kind, str) else ""
    files = () if problem else _files(path, kind, possible_weights)
    return Item(settings.model, path, files, settings.arguments, problem, settings.referenced)


def _files(path: Path, kind: Kind | str, possible_weights: tuple[Path, ...]) -> tuple[Path, ...]:
    if path.is_dir():
        return tuple(sorted(found for found in path.rglob("*") if found.is_file()))
    if kind is Kind.SHARDED:
        return (path, *(shard for shard in _shards(path) if shard.is_file()))
    # External data may have any name. One file too many only converts once too often; one too few would keep an
    # outdated artifact.
    return (path, *possible_weights) if kind is Kind.ONNX else (path,)


def _shards(index: Path) -> list[Path]:
    """Return the files that the index of a sharded checkpoint names; raise :class:`SourceError` for another file."""
    if index.is_dir():
        return []
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise SourceError(f"{index}: is not the index of a sharded checkpoint") from None
    plain = (name for name in sorted(map(str, names)) if Path(name).name == name and "\0" not in name)
    return [index.parent / name for name in plain if len(name.encode(errors="replace")) <= _LONGEST_NAME]


def _may_hold_weights(path: Path) -> bool:
    """Whether ``path``, which is no checkpoint, may hold the weights of an ONNX graph beside it."""
    return path.is_file() and path.suffix.lower() not in _WITHOUT_WEIGHTS


def _referenced_files(path: Path) -> list[Path]:
    """Return the files that are read for ``path``: itself, an ONNX graph's weights beside it, or samples in it."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not path.is_file() or not _is_graph(path):
        return [path] if path.is_file() else []
    possible_weights = (each for each in path.parent.iterdir() if _may_hold_weights(each) and not _is_checkpoint(each))
    return [path, *sorted(possible_weights)]


def _is_graph(path: Path) -> bool:
    try:
        return recognise(path) is Kind.ONNX
    except SourceError:
        return False


def _is_checkpoint(path: Path) -> bool:
    try:
        recognise(path)
    except NoCheckpoint:
        return False
    except SourceError:
        return True
    return True


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files_of(items: Sequence[Item]) -> set[Path]:
    return {path for item in items for path in item.files}


def _check_names(items: Sequence[Item]) -> None:
    counts = Counter(item.model for item in items)
    for item in items:
        if counts[item.model] > 1:
            twins = ", ".join(other.source.name for other in items if other.model == item.model)
            raise UsageError(
                f"{item.source.parent}: {twins} would all become model {item.model!r}; rename them, or pass"
                " --per-model DIRECTORY with a FILE.yaml for each that sets `name: …`"
            )


def _without_path(error: SourceError, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")


def _listed(reasons: Iterable[str]) -> str:
    found = Counter(reasons)
    return "".join(f"\n  {count} × {reason}" for reason, count in found.most_common(_SHOWN))
