"""Artifacts that were changed on purpose and whose digests were corrected: only their content shows the change."""

import hashlib
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing import bytewise, onnx_edits, safetensors_edits
from fuzzing.json_edits import change
from google.protobuf.message import DecodeError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bf16kit.numerics.tensors import Array

ZEROS = "0" * 64
NUMBERS = (0, -1, 1, 2, 7, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30, 1.5, -0.0, 1e308, math.nan, math.inf, True)
TEXTS = (
    "", ".", "..", "../outside", "/etc/passwd", "a\0b", "a\nb", "é" * 300, "x" * 70_000, "\ud800", "\u202eabc",
    "weights.bf16", "manifest.json", "cpu.onnx", "golden.safetensors", "nothing.bin", "batch", "x", "y", "float32",
    "float64", "int8", "string", "bfloat16", "float8", "inf", "nan", "onnx", "torchscript", "cpu", "cuda", "logits",
    "fp32", "0" * 64,
)  # fmt: skip
KEYS = (
    "inputs", "outputs", "batch_axis", "profiles", "reference", "golden", "tensors", "budget", "drift",
    "schema_version", "model", "source",
)  # fmt: skip
_OTHERS: tuple[Callable[[Array], Array], ...] = (
    lambda array: np.full_like(array, np.nan if array.dtype.kind == "f" else -1),
    lambda array: array.astype(np.float64),
    lambda array: array.astype(np.int32),
    lambda array: array.astype(np.bool_),
    lambda array: np.ascontiguousarray(array[..., :-1]),
    lambda array: array[:0],
    lambda array: np.repeat(array, 100, 0),
    lambda array: array.reshape(-1),
    lambda array: array[None],
)


def tampered(source: Path, target: Path, choice: random.Random) -> str:
    """Copy the artifact ``source`` to ``target`` with one to three changes. Return what was changed."""
    shutil.copytree(source, target)
    fields = json.loads((target / "manifest.json").read_text())
    edits = choice.choices((_manifest, _graph, _golden, _weights), (6, 5, 2, 2), k=choice.choice((1, 1, 1, 2, 3)))
    descriptions = [edit(target, fields, choice) for edit in edits]
    seal(target, fields)
    if choice.random() < 0.03:
        descriptions.append(_spoil_text(target / "manifest.json", choice))
    return "; ".join(descriptions)


def seal(directory: Path, fields: dict[str, Any]) -> None:
    """Write ``fields`` as the manifest: the current sizes and digests of files, unless ``kept``, and its own digest."""
    files = fields.get("files")
    for name, entry in files.items() if isinstance(files, dict) else ():
        if isinstance(entry, dict) and name in {file.name for file in directory.iterdir()}:
            data = (directory / name).read_bytes()
            if not entry.pop("kept", False):
                entry.update(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    text = json.dumps(fields | {"digest": ZEROS}, sort_keys=True, indent=1) + "\n"
    text = text.replace(f'\n "digest": "{ZEROS}"', f'\n "digest": "{hashlib.sha256(text.encode()).hexdigest()}"', 1)
    (directory / "manifest.json").write_text(text)


def _manifest(directory: Path, fields: dict[str, Any], choice: random.Random) -> str:
    key = choice.choice(KEYS) if choice.random() < 0.7 else choice.choice(sorted(fields))
    part = {key: fields.pop(key, None)}
    deep: Any = []
    for _ in range(choice.choice((3, 50, 900))):
        deep = [deep]
    others: tuple[Any, ...] = (None, [], {}, [None], {"": 0}, deep, [1] * 5000)
    done = change(part, choice.choice((NUMBERS, TEXTS, others)), TEXTS, choice)
    fields |= part
    if key == "files" and isinstance(part[key], dict) and choice.random() < 0.5:
        for entry in part[key].values():  # a wrong size or digest stays wrong
            if isinstance(entry, dict):
                entry["kept"] = True
    return f"manifest: {key}, {done}: {repr(part)[:300]}"


def _spoil_text(manifest: Path, choice: random.Random) -> str:
    """Spoil the manifest's text: a duplicate key, invalid UTF-8, or a number that is too large. Correct its digest."""
    data = manifest.read_bytes()
    place = data.rindex(b"\n}")
    more = choice.choice(
        (b',\n "model": "again"', b',\n "\xff": 0', b',\n "seed": 1e400', b',\n "seed": ' + b"9" * 5000)
    )
    lines = (data[:place] + more + data[place:]).splitlines(keepends=True)
    own = next(i for i, line in enumerate(lines) if line.startswith(b' "digest"'))
    lines[own] = b' "digest": "' + ZEROS.encode() + b'",\n'
    lines[own] = lines[own].replace(ZEROS.encode(), hashlib.sha256(b"".join(lines)).hexdigest().encode())
    manifest.write_bytes(b"".join(lines))
    return f"manifest's text: {more[:20]!r} added"


def _bytes(file: Path, choice: random.Random) -> str:
    edit = choice.choice(bytewise.EDITS)
    file.write_bytes(edit(file.read_bytes(), choice))
    return f"{file.name}: {edit.__name__}"


def _graph(directory: Path, fields: dict[str, Any], choice: random.Random) -> str:
    file = directory / choice.choice(("cpu.onnx", "cpu.onnx", "cpu.onnx", "reference.onnx"))
    if choice.random() < 0.3:
        return _bytes(file, choice)
    try:
        done, content = onnx_edits.edit(file.read_bytes(), choice, "/etc/passwd")
    except DecodeError:  # an earlier change made it unreadable
        return _bytes(file, choice)
    file.write_bytes(content)
    return f"{file.name}: {done}"


def _golden(directory: Path, fields: dict[str, Any], choice: random.Random) -> str:
    """Replace, add or remove an array of the golden samples, or change their file."""
    file, kind = directory / "golden.safetensors", choice.random()
    try:
        if kind < 0.25:
            done, content = safetensors_edits.edit(file.read_bytes(), choice)
            file.write_bytes(content)
            return f"golden: {done}"
        arrays = load_file(file)
    except (SafetensorError, KeyError, ValueError):  # an earlier change made it unreadable
        return _bytes(file, choice)
    name = choice.choice(sorted(arrays))
    other = choice.randrange(len(_OTHERS))
    if kind < 0.35:
        del arrays[name]
    elif kind < 0.45:
        arrays[f"{name}2"] = arrays[name]
    elif kind < 0.55:
        arrays = {key: np.concatenate([array, array]) for key, array in arrays.items()}
    else:
        arrays[name] = _OTHERS[other](arrays[name])
    save_file(arrays, file)
    return f"golden: {name}, kind {kind:.2f}, {other}"


def _weights(directory: Path, fields: dict[str, Any], choice: random.Random) -> str:
    file = directory / choice.choice(("weights.bf16", "weights.bf16", "residual.bin"))
    if choice.random() < 0.6:
        return _bytes(file, choice)
    size = file.stat().st_size // 2
    pattern = choice.choice((b"", b"\0\0", b"\xc0\x7f", b"\x80\x7f", choice.randbytes(2)))  # zero, NaN, infinity
    file.write_bytes(pattern * size)
    return f"{file.name}: {pattern!r} everywhere"
