"""Edits of safetensors files, whose headers are parsed and rewritten, and of the index of shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

Header = dict[str, Any]
Edit = Callable[[Header, Random], None]

LENGTHS = (0, 1, 2, 7, 100_000_000, 100_000_001, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 1)
OFFSETS = (-1, 0, 1, 3, 4, 100, 2**31, 2**40, 2**53, 2**63, 2**64 - 1, 2**64, 0.5, "0", None, True)
SHAPES: tuple[Any, ...] = (
    [], [0], [-1], [2**32, 2**32], [2**63], [2**64, 0], [16, 64], [1024], [1] * 60, [1] * 70, [64, 16, 1], [1.5], ["64"], "64", None, [True, 64],
    [[64]], [2**62, 4], [0, 2**62], [2**31, 2**31, 4],
)  # fmt: skip
DTYPES = (
    "F32",
    "F64",
    "F16",
    "BF16",
    "I32",
    "U8",
    "BOOL",
    "I64",
    "F8_E4M3",
    "C64",
    "F4",
    "f32",
    "",
    None,
    7,
    ["F32"],
    "F32\x00",
)
NAMES = ("", "__metadata__", "a\x00b", "\ud800", "../../x", "up.weight", "x" * 70_000, "\x1b[31m", "state_dict", "ünï")


def _tensor(header: Header, random: Random) -> dict[str, Any]:
    entries = [entry for name, entry in header.items() if name != "__metadata__" and isinstance(entry, dict)]
    return random.choice(entries) if entries else {}


def offsets(header: Header, random: Random) -> None:
    entry = _tensor(header, random)
    entry["data_offsets"] = random.choice(
        (
            [random.choice(OFFSETS), random.choice(OFFSETS)],
            [0],
            [],
            [0, 4, 8],
            None,
            "0,4",
            {"0": 4},
            _moved(entry, random),
        )
    )


def _moved(entry: dict[str, Any], random: Random) -> Any:
    return [
        offset + random.choice((-4, 4, 64, -64))
        for offset in entry.get("data_offsets", [0, 4])
        if isinstance(offset, int)
    ]


def shape(header: Header, random: Random) -> None:
    _tensor(header, random)["shape"] = random.choice(SHAPES)


def dtype(header: Header, random: Random) -> None:
    _tensor(header, random)["dtype"] = random.choice(DTYPES)


def swap(header: Header, random: Random) -> None:
    """Swap the data offsets of two tensors."""
    first, second = _tensor(header, random), _tensor(header, random)
    first["data_offsets"], second["data_offsets"] = second.get("data_offsets"), first.get("data_offsets")


def alias(header: Header, random: Random) -> None:
    """Add a second name for the same bytes."""
    header[random.choice(NAMES)] = dict(_tensor(header, random))


def rename(header: Header, random: Random) -> None:
    names = [name for name in header if name != "__metadata__"]
    if names:
        header[random.choice(NAMES)] = header.pop(random.choice(names))


def drop(header: Header, random: Random) -> None:
    header.pop(random.choice(list(header) or [""]), None)


def key(header: Header, random: Random) -> None:
    """Remove a key of a tensor's entry, or add one."""
    entry = _tensor(header, random)
    if random.random() < 0.5:
        entry.pop(random.choice(("dtype", "shape", "data_offsets")), None)
    else:
        entry[random.choice(("stride", "dtype ", "offset"))] = random.choice((1, [], {}))


def entry(header: Header, random: Random) -> None:
    names = list(header) or ["w"]
    header[random.choice(names)] = random.choice((None, 1, [], "F32", {}, [1, 2], True))


def metadata(header: Header, random: Random) -> None:
    header["__metadata__"] = random.choice(
        ({"a": 1}, [], "text", {"format": None}, {"a": {"b": "c"}}, None, {"\ud800": "x"})
    )


EDITS: tuple[Edit, ...] = (offsets, offsets, shape, shape, dtype, swap, alias, rename, drop, key, entry, metadata)


def edit(content: bytes, random: Random) -> tuple[str, bytes]:
    """Return the names of one or two edits, and the file after them. They change the header, its JSON, or the data."""
    size = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + size], content[8 + size :]
    what = random.random()
    if what < 0.15:
        return "length", random.choice(LENGTHS).to_bytes(8, "little") + text + data
    if what < 0.35:
        name, text = _rewritten(text, random)
        return name, len(text).to_bytes(8, "little") + text + data
    if what < 0.42:
        return "values", content[: 8 + size] + _special(data, random)
    header, names = json.loads(text), []
    for _ in range(random.choice((1, 1, 2))):
        chosen = random.choice(EDITS)
        names.append(chosen.__name__)
        chosen(header, random)
    text = json.dumps(header).encode()
    return "+".join(names), len(text).to_bytes(8, "little") + text + data


def _special(data: bytes, random: Random) -> bytes:
    """Replace a weight with NaN, infinity, the largest fp32 number, the smallest subnormal or -0."""
    value = random.choice((0x7FC00000, 0x7F800000, 0x7F7FFFFF, 0x00000001, 0xFFFFFFFF, 0x80000000))
    position = 4 * random.randrange(len(data) // 4)
    return data[:position] + value.to_bytes(4, "little") + data[position + 4 :]


def _rewritten(text: bytes, random: Random) -> tuple[str, bytes]:
    """Return the header as unusual or invalid JSON, and a name for what was done."""
    body = text.strip()
    deep = random.choice((200, 5_000, 500_000))
    return random.choice(
        (
            ("duplicate key", body[:-1] + b"," + body[1:]),
            ("nested lists", b'{"w":' + b"[" * deep + b"]" * deep + b"}"),
            ("nested objects", b'{"w":' * deep + b"1" + b"}" * deep),
            ("open brackets", b'{"w":' + b"[" * deep),
            ("long number", body.replace(b"[0,", b"[" + b"9" * 5_000 + b",")),
            ("NaN", body.replace(b"[0,", b"[NaN,")),
            ("exponent", body.replace(b"[0,", b"[1e400,")),
            ("lone surrogate", body.replace(b"up.weight", b"\\ud800")),
            ("no UTF-8", body.replace(b"up.weight", b"\xff\xfe")),
            ("NUL", body.replace(b"up.weight", b"up\\u0000weight")),
            ("raw NUL", body.replace(b"up.weight", b"up\x00weight")),
            ("spaces before", b"  " + body),
            ("BOM", b"\xef\xbb\xbf" + body),
            ("UTF-16", body.decode(errors="replace").encode("utf-16")),
            ("padding", body + b" " * random.choice((1, 7, 100_000))),
            ("rest behind", body + b"{}"),
            ("comment", body[:-1] + b"/* */}"),
            ("nothing", b"{}"),
        )
    )


SHARDS = ("../secret.safetensors", "{canary}.safetensors", "/etc/hostname", "", ".", "..", "a.safetensors", "i.json", "missing.safetensors", "link",
          "sub/a.safetensors", "a.safetensors\x00", "\ud800", "a" * 300, "./a.safetensors", 7, None, ["a.safetensors"], {"a": 1}, True)  # fmt: skip


def edit_index(content: bytes, random: Random, canary: str) -> tuple[str, bytes]:
    """Return the name of one edit and the index after it."""
    index = json.loads(content)
    weights: dict[str, Any] = index["weight_map"]
    what = random.randrange(7)
    if what <= 2:
        shard = random.choice(SHARDS)
        weights[random.choice(list(weights))] = shard.replace("{canary}", canary) if isinstance(shard, str) else shard
        return "shard", json.dumps(index).encode()
    if what == 3:
        weights.pop(random.choice(list(weights)))
        return "missing weight", json.dumps(index).encode()
    if what == 4:
        weights[random.choice(NAMES)] = random.choice(("a.safetensors", "b.safetensors"))
        return "more weights", json.dumps(index).encode()
    if what == 5:
        index["weight_map"] = random.choice(([], None, 7, "x", {}, [["up.weight", "a.safetensors"]]))
        return "weight map", json.dumps(index).encode()
    return _rewritten(content, random)
