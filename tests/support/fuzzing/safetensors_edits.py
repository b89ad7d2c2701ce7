"""Edits of safetensors files, whose headers are parsed and rewritten, and of the index of shards."""

import json
from random import Random
from typing import Any

from fuzzing.bytewise import special
from fuzzing.json_edits import change, rewritten

_LENGTHS = (0, 1, 2, 7, 100_000_000, 100_000_001, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 1)
_OFFSETS = (-1, 0, 1, 3, 4, 64, 100, 2**31, 2**40, 2**53, 2**63, 2**64 - 1, 2**64, 0.5, "0", None, True)
_SHAPES: tuple[Any, ...] = (
    [], [0], [-1], [2**32, 2**32], [2**63], [2**64, 0], [16, 64], [1024], [1] * 60, [1] * 70, [64, 16, 1], [1.5], ["64"], "64", None, [True, 64],
    [[64]], [2**62, 4], [0, 2**62], [2**31, 2**31, 4],
)  # fmt: skip
_DTYPES = (
    "F32", "F64", "F16", "BF16", "I32", "U8", "BOOL", "I64", "F8_E4M3", "C64", "F4", "f32", "", 7, ["F32"],
    "F32\x00",
)  # fmt: skip
_PARTS: tuple[Any, ...] = ([0], [0, 4], [0, 4, 8], "0,4", {"0": 4}, {}, {"a": 1}, {"a": {"b": "c"}}, {"\ud800": "x"})
_NAMES = (
    "", "__metadata__", "a\x00b", "\ud800", "../../x", "up.weight", "x" * 70_000, "\x1b[31m", "state_dict", "ünï",
    "dtype", "shape", "stride",
)  # fmt: skip


def edit(content: bytes, random: Random) -> tuple[str, bytes]:
    """Return the names of one or two edits, and the file after them. They change the header, its JSON, or the data."""
    size = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + size], content[8 + size :]
    what = random.random()
    if what < 0.15:
        return "length", random.choice(_LENGTHS).to_bytes(8, "little") + text + data
    if what < 0.22:
        return "values", content[: 8 + size] + special(data, random)
    if what < 0.4:
        name, text = rewritten(text, random)
    else:
        header = json.loads(text)
        values = random.choice((_OFFSETS, _SHAPES, _DTYPES, _PARTS))
        name = "+".join(change(header, values, _NAMES, random) for _ in range(random.choice((1, 1, 2))))
        text = json.dumps(header).encode()
    return name, len(text).to_bytes(8, "little") + text + data


_SHARDS = ("../secret.safetensors", "{canary}.safetensors", "/etc/hostname", "", ".", "..", "a.safetensors", "i.json", "missing.safetensors", "link",
          "sub/a.safetensors", "a.safetensors\x00", "\ud800", "a" * 300, "./a.safetensors", 7, None, ["a.safetensors"], {"a": 1}, True)  # fmt: skip


def edit_index(content: bytes, random: Random, canary: str) -> tuple[str, bytes]:
    """Return the name of one edit and the index after it."""
    index = json.loads(content)
    what = random.random()
    if what < 0.45:
        shard: Any = random.choice(_SHARDS)
        name = random.choice((*index["weight_map"], *_NAMES))
        index["weight_map"][name] = shard.replace("{canary}", canary) if isinstance(shard, str) else shard
        return "shard", json.dumps(index).encode()
    if what < 0.85:
        return change(index, (None, 7, *_PARTS), _NAMES, random), json.dumps(index).encode()
    return rewritten(content, random)
