"""Reads JAX checkpoints, Orbax directories and Flax's msgpack files; a map fills the model with their leaves.

Flax's file is a map of maps whose leaves are arrays. Extension 1, or 3 for a numpy scalar, holds the msgpack of
``[shape, dtype's name, bytes in C order]``; extension 2 is a complex number. Arrays of more than 2**30 bytes are split
into a map with the key ``__msgpack_chunked_array__``.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.wording import brief, quoted
from bf16kit.numerics.tensors import BY_NAME
from converter.options import Options
from converter.read.detect import Kind
from converter.read.sources import Advance, precision_notes
from converter.source import Array, Checkpoint, Source, digest_files

# Top-level keys of a training state for the optimizer's data, which is two or three times as large as the weights.
_TRAINING = ("opt_state", "optimizer", "optimizer_state")


def read(options: Options, kind: Kind, advance: Advance) -> Source:
    """Return the checkpoint as a source; :class:`UsageError` if ``--model`` is missing."""
    from converter.read import orbax
    from converter.read.bareweights import into_model

    if options.model is None:
        raise UsageError(
            f"{options.source}: holds weights but no architecture; name it with --model pkg.mod:factory (a function or"
            " class that returns the torch module) or --model graph.onnx"
        )
    if kind is Kind.ORBAX:
        item = orbax.locate(options.source, options.step, options.item)
        leaves, left_out, files = orbax.read_item(item, _of_the_model, options.target.path.parent)
    else:
        item, files, everything = options.source, [options.source], read_flax(options.source)
        leaves = {name: array for name, array in everything.items() if _of_the_model(name)}
        left_out = sorted(everything.keys() - leaves.keys())
    if not leaves:
        raise SourceError(f"{options.source}: holds no arrays other than those of an optimizer")
    notes = precision_notes(options, leaves)
    if item != options.source:
        where = quoted(str(item.relative_to(options.source)))
        notes.insert(0, f"the weights are those of {where} in {options.source.name}; --step and --item choose others")
    if left_out:
        keys = ", ".join(sorted({name.partition(".")[0] for name in left_out}))
        count = f"{len(left_out)} array{'' if len(left_out) == 1 else 's'}"
        notes.append(f"left out: {count} of the training state under {keys}; restore does not give them back")
    form = "orbax" if kind is Kind.ORBAX else "flax-msgpack"
    return into_model(options, Checkpoint(form, digest_files(files, advance), leaves), notes)


def _of_the_model(name: str) -> bool:
    keys = name.split(".")
    return keys[0] not in _TRAINING or "target" in keys[1:2]  # flax.optim stored the weights in its optimizer


def read_flax(path: Path) -> dict[str, Array]:
    """Return the arrays of ``path`` by their keys joined with dots, in the file's order.

    Numbers become arrays without dimensions, as in Orbax; strings, None and complex numbers are left out. Raises
    :class:`SourceError` for a file that is damaged or truncated, and :class:`UsageError` when msgpack is not installed.
    """
    try:
        import msgpack
    except ImportError:
        raise UsageError(f"{path}: Flax files are read with msgpack: pip install 'bf16kit[jax]'") from None

    def array(code: int, data: bytes) -> Array | None:
        if code == 2:
            return None
        shape, dtype, content = msgpack.unpackb(data, raw=True)
        name = dtype.decode()
        if name not in BY_NAME or name == "string":
            known = ", ".join(name for name in BY_NAME if name != "string")
            raise ValueError(f"an array has the unknown dtype {quoted(name)}; known: {known}")
        return np.frombuffer(content, BY_NAME[name].numpy).reshape(shape)

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
