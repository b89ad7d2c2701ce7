"""Reads JAX checkpoints, Orbax directories and Flax's msgpack files; a map fills the model with their leaves.

Orbax is a directory layout around tensorstore, which it uses itself: zarr or zarr 3 arrays, each in a folder or all in
one B-tree (OCDBT), and a JSON file that lists them.

Flax's file is a map of maps. Extension 1, or 3 for a numpy scalar, holds the msgpack of ``[shape, dtype's name, bytes
in C order]``; extension 2 is a complex number. A larger array is a map with the key ``__msgpack_chunked_array__``.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bf16kit.converter.options import Options
from bf16kit.converter.read.sources import Advance, check_claim, no_architecture, precision_notes
from bf16kit.converter.source import Array, Checkpoint, Source, digest_files
from bf16kit.messages.errors import NoCheckpoint, SourceError, UsageError
from bf16kit.messages.wording import brief, first_few, quoted
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.runtime.memory.scratch import ScratchUnavailable, on_disk, scratch_file

if TYPE_CHECKING:
    from bf16kit.converter.read.detect import Kind

_TRAINING = ("opt_state", "optimizer", "optimizer_state")  # top-level keys of a training state for other than weights
_METADATA = "_METADATA"
_MANIFEST = "manifest.ocdbt"
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # tensorstore's driver, by the file beside an array's chunks
_CHECKPOINT = "_CHECKPOINT_METADATA"  # in a step, or in a directory that the v1 API wrote
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a directory that is being written, or whose writer died
_COMMITTED = "commit_success.txt"  # on storage that cannot rename a directory atomically
_STEP = re.compile(r"(|.*[^0-9])([0-9]{1,18})")
_NOT_ARRAYS = ("string", "None", "Dict", "List", "Tuple", "NamedTuple")
_LARGE = 1 << 20  # bytes; smaller arrays stay in memory


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return the checkpoint as a source; :class:`UsageError` if ``--model`` is missing."""
    from bf16kit.converter.read.bareweights import into_model

    item, orbax = options.source, options.source.is_dir()
    if options.model is None:
        raise no_architecture(item)
    if orbax:
        item = locate(item, options.step, options.item)
        leaves, left_out, files = read_item(item, _of_the_model, options.target.path.parent)
    else:
        files, found = [item], read_flax(item)
        leaves = {name: array for name, array in found.items() if _of_the_model(name)}
        left_out = sorted(found.keys() - leaves.keys())
    if not leaves:
        raise SourceError(f"{options.source}: holds no arrays other than those of an optimizer")
    notes = precision_notes(options, leaves)
    if item != options.source:
        where = quoted(str(item.relative_to(options.source)))
        notes.insert(0, f"the weights are those of {where} in {options.source.name}; --step and --item choose others")
    if left_out:
        keys = ", ".join(sorted({name.partition(".")[0] for name in left_out}))
        notes.append(f"the training state under {keys} was left out ({len(left_out)}); restore does not give it back")
    form = "orbax" if orbax else "flax-msgpack"
    return into_model(options, Checkpoint(form, digest_files(files, advance), leaves), notes)


def _of_the_model(name: str) -> bool:
    return name.partition(".")[0] not in _TRAINING


def _dtype(owner: str, name: str) -> np.dtype[Any]:
    """Return the dtype called ``name``; :class:`SourceError` if bf16kit has no such tensors."""
    known = [own for own in BY_NAME if own != "string"]
    if name not in known:
        raise SourceError(f"{owner} has the unknown dtype {quoted(name)}; known: {', '.join(known)}")
    return BY_NAME[name].numpy


# --- Flax -------------------------------------------------------------------------------------------------------------


def read_flax(path: Path) -> dict[str, Array]:
    """Return the arrays of ``path`` by their keys joined with dots, in the file's order.

    Numbers become arrays without dimensions, as in Orbax; strings, None and complex numbers are left out. Raises
    :class:`SourceError` for a damaged file, and :class:`UsageError` when msgpack is not installed.
    """
    try:
        import msgpack
    except ImportError:
        raise UsageError(f"{path}: Flax files are read with msgpack: pip install 'bf16kit[jax]'") from None

    def array(code: int, data: bytes) -> Array | None:
        if code == 2:
            return None
        shape, dtype, content = msgpack.unpackb(data, raw=True)
        return np.frombuffer(content, _dtype("an array", dtype.decode())).reshape(shape)

    found: dict[str, Array] = {}
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            tree = msgpack.unpackb(content, ext_hook=array, raw=False)
        for name, leaf in _leaves("", tree):
            if name in found:
                raise ValueError(f"two arrays are called {quoted(name)}")
            found[name] = leaf
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # whatever msgpack and numpy raise for bytes and shapes that are not Flax's
        raise SourceError(
            f"{path}: truncated or damaged: not a Flax checkpoint ({brief(error) or type(error).__name__})"
        ) from error
    return found


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Array]]:
    if isinstance(value, dict) and "__msgpack_chunked_array__" in value:
        shape, chunks = ([value[key][str(i)] for i in range(len(value[key]))] for key in ("shape", "chunks"))
        value = np.concatenate(chunks).reshape(shape)
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, np.ndarray | bool | int | float):
        yield prefix, np.asarray(value)


# --- Orbax: its directories -------------------------------------------------------------------------------------------


def is_orbax(path: Path) -> bool:
    """Return whether Orbax wrote the directory ``path``: an item, a step with items, or a directory of steps."""
    step = path.name.isdecimal() and _holds_items(path)  # older versions write it without metadata of its own
    return step or _is_item(path) or (path / _CHECKPOINT).exists() or len(_steps(path)) == 1


def locate(path: Path, step: int | None, item: str | None) -> Path:
    """Return the directory in ``path`` with one tree of arrays: of ``step`` (default: the newest) and ``item``.

    Raises :class:`UsageError` naming what exists when ``step`` or ``item`` does not or must be chosen, and
    :class:`SourceError` when there are no arrays.
    """
    if not _is_item(path):
        refuse_several(path)
    steps = {} if _is_item(path) else next(iter(_steps(path).values()), {})
    if step is None and not any(map(_is_item, (path, *_directories(path)))):
        step = max(steps, default=None)
    if step is not None and step not in steps:
        raise UsageError(f"--step {step}: {path} has {', '.join(map(str, sorted(steps)[-10:])) or 'no step'}")
    found = path if step is None else steps[step]
    if _is_item(found):
        if item is not None:
            raise UsageError(f"--item {item}: {found} is a single item; leave out --item")
        return found
    items = {child.name: child for child in _directories(found) if _is_item(child)}
    if not items:
        raise SourceError(f"{found}: holds no arrays that Orbax wrote ({_METADATA} and {_MANIFEST} are missing)")
    if item is None and len(items) > 1:
        raise UsageError(f"{found}: holds several items, {', '.join(items)}; choose one with --item NAME")
    item = item or next(iter(items))
    if item not in items:
        raise UsageError(f"--item {item}: {found} has {', '.join(items)}")
    return items[item]


def refuse_several(path: Path) -> None:
    """Raise :class:`NoCheckpoint` if ``path`` holds checkpoints named like steps, but with several prefixes."""
    names = [quoted(next(iter(steps.values())).name) for steps in _steps(path).values()]
    if len(names) > 1:
        raise NoCheckpoint(
            f"{path}: {first_few(names)} are checkpoints with different names, not steps of one model;"
            " convert one of them by its own path, or all with --out REPOSITORY"
        )


def _steps(path: Path) -> dict[str, dict[int, Path]]:
    """Return finished steps by prefix and number: ``<step>`` or ``<prefix>_<step>``."""
    found: dict[str, dict[int, Path]] = {}
    complete = [child for child in _directories(path) if _UNFINISHED not in child.name and _holds_items(child)]
    for child in [child for child in complete if (child / _COMMITTED).exists()] or complete:
        if match := _STEP.fullmatch(child.name):
            found.setdefault(match[1], {})[int(match[2])] = child
    return found


def _holds_items(path: Path) -> bool:
    return _is_item(path) or (path / _CHECKPOINT).is_file() or any(map(_is_item, _directories(path)))


def _is_item(path: Path) -> bool:
    """Return whether ``path`` directly holds arrays."""
    arrays = (child / name for child in _directories(path) for name in _DRIVERS)
    return any(file.is_file() for file in (path / _MANIFEST, path / _METADATA, *arrays))


def _directories(path: Path) -> list[Path]:
    try:
        return sorted(child for child in path.iterdir() if child.is_dir())
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None


# --- Orbax: its arrays ------------------------------------------------------------------------------------------------


def read_item(
    item: Path, is_wanted: Callable[[str], bool], scratch: Path
) -> tuple[dict[str, Array], list[str], list[Path]]:
    """Return the arrays of ``item`` that ``is_wanted``, by keys joined with dots; the names of the others; its files.

    Large arrays are in temporary files in ``scratch``, whose pages the system can reclaim. Raises :class:`SourceError`
    when ``item`` is damaged or incomplete, and :class:`UsageError` when tensorstore is not installed.
    """
    try:
        import tensorstore
    except ImportError:
        raise UsageError(f"{item}: Orbax checkpoints are read with tensorstore: pip install 'bf16kit[jax]'") from None
    files = sorted((path for path in item.rglob("*") if path.is_file()), key=str)
    where, claimed, chunk = f"{item}: ", 0, 0
    try:
        names, complete = _listed_arrays(item / _METADATA)
        base = {"driver": "file", "path": f"{item.resolve()}/"}
        tree = {"driver": "ocdbt", "base": base} if (item / _MANIFEST).is_file() else base
        store = tensorstore.KvStore.open(tree).result()
        keys = (key.decode().rpartition("/") for key in store.list().result())
        drivers = {owner: _DRIVERS[last] for owner, _, last in keys if owner and last in _DRIVERS}
        opened: dict[str, Any] = {}
        for name in sorted(drivers) if names is None else names:
            where = f"{item}: array {quoted(name)} "
            if name not in drivers:
                raise SourceError(f"{where}is in the checkpoint's list, but not in its files; the copy is incomplete")
            if is_wanted(name):
                spec = {"driver": drivers[name], "fill_missing_data_reads": not complete}
                array: Any = tensorstore.open(spec, kvstore=store / f"{name}/", open=True, read=True).result()
                itemsize = _dtype(f"{item}: array {quoted(name)}", array.dtype.name).itemsize
                claimed += math.prod(array.shape) * itemsize
                chunk = max(chunk, math.prod(array.chunk_layout.write_chunk.shape or ()) * itemsize)
                opened[name] = array
        check_claim(item, claimed + chunk, files)  # before memory is allocated
        arrays: dict[str, Array] = {}
        for name, array in opened.items():
            where = f"{item}: array {quoted(name)} "
            arrays[name] = _empty(array.shape, array.dtype.numpy_dtype, scratch)
            tensorstore.array(arrays[name]).write(array).result()
    except SourceError:
        raise
    except ScratchUnavailable as error:
        raise SourceError(f"{item}: its arrays do not fit in the temporary directory: {error}") from None
    except Exception as error:  # whatever tensorstore raises for damaged or missing files
        reason = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
        raise SourceError(f"{where}cannot be read; damaged, or an incomplete copy: {brief(reason)}") from error
    return arrays, sorted((drivers if names is None else set(names)) - arrays.keys()), files


def _listed_arrays(path: Path) -> tuple[list[str] | None, bool]:
    """Return the arrays that ``_METADATA`` lists, None if there is no such file, and whether every chunk must exist."""
    if not path.is_file():
        return None, False
    try:
        fields = json.loads(path.read_bytes())
        names = {
            ".".join(str(key["key"]) for key in leaf["key_metadata"])
            for leaf in fields["tree_metadata"].values()
            if not leaf["value_metadata"].get("skip_deserialize")
            and leaf["value_metadata"]["value_type"] not in _NOT_ARRAYS
        }
        # In older versions a missing chunk means zeros.
        return sorted(names), bool(fields.get("store_array_data_equal_to_fill_value"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SourceError(f"{path}: damaged: it does not list the checkpoint's arrays as Orbax does") from None


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], scratch: Path) -> Array:
    """Return an array for data, in a temporary file unless it is small."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE:
        return np.empty(shape, dtype)
    with scratch_file(nbytes, on_disk(scratch), in_memory=True) as (_, data):
        return data.view(dtype).reshape(shape)
