"""Edits of JSON that know only its structure: a member is removed, renamed, copied, nested or replaced."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any


def change(fields: Any, values: Sequence[Any], names: Sequence[str], random: Random) -> str:
    """Change one member at any depth, and return what was done."""
    places = list(_places(fields))
    if not places:
        return "as it is"
    owner, key = random.choice(places)
    what = random.random()
    if what < 0.15:
        del owner[key]
        return "drop"
    if what < 0.3 and isinstance(owner, dict):
        owner[random.choice(names)] = owner[key] if random.random() < 0.5 else owner.pop(key)
        return "name"
    if what < 0.4:
        owner[key] = random.choice(([owner[key]], {"name": owner[key]}))
        return "nest"
    owner[key] = random.choice(values)
    return "value"


def _places(fields: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(fields) if isinstance(fields, dict) else range(len(fields)) if isinstance(fields, list) else []
    for key in keys:
        yield fields, key
        yield from _places(fields[key])


def rewritten(text: bytes, random: Random) -> tuple[str, bytes]:
    """Return a JSON object as unusual or invalid JSON, and a name for what was done."""
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
            ("BOM", b"\xef\xbb\xbf" + body),
            ("UTF-16", body.decode(errors="replace").encode("utf-16")),
            ("padding", b"  " + body + b" " * random.choice((1, 7, 100_000))),
            ("rest behind", body + b"{}"),
            ("comment", body[:-1] + b"/* */}"),
            ("nothing", b"{}"),
        )
    )
