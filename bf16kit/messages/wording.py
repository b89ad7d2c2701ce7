"""Text for users, with other libraries' messages shortened and cleaned, and JSON for programs."""

from __future__ import annotations

import difflib
import html
import io
import json
import math
import os
import re
import reprlib
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import Bf16kitError

LONGEST = 320  # characters of a reason
_LONG = re.compile(r"\S{300,}")
_READ = 20_000  # characters of a library's text that are read
_KEPT = 40  # characters of each end of a long word

_QUOTED = 100  # characters of a peer's text
_CODE = re.compile(r"\[ONNXRuntimeError\] : -?\d+ : (\w+) : ")
# ONNX Runtime's way of naming the node that failed, once per subgraph that contains it.
_FAILED = re.compile(
    r"(?:[A-Z_]+: )?Non-zero status code returned while running (\w+) node\. Name:'([^']*)' Status Message: ?"
)
_LOADED = re.compile(r"Load model from .*? failed: ?")
# The place in a library's sources: a path and a line, often followed by the signature of a C++ function.
_SIGNATURE = r"(?: [^()'\n]*\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])?)?"
_PLACE = re.compile(rf"\S*\.(?:cc|cpp|cu|h|hpp|c|py)\"?:\d+(?::|\]|\b){_SIGNATURE}:? ?\.? ?")
_ASSERTED = "INTERNAL ASSERT FAILED"  # PyTorch, after the C++ condition that failed
_FRAMES = re.compile(r"\n(?:Exception raised from|frame #|==> Context:|\s*#\d+ ).*", re.DOTALL)
# A library's memory address, which differs in each run; torch names its compilation units by it.
_UNIT = re.compile(r" \(of Python compilation unit at: 0x[0-9a-f]+\)")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")
_SIMILAR = 0.7  # similarity, of 1: a wrong letter or two, swapped ones, a part left out
_NARROWEST = 120  # columns; below this, wrapped lines are easier to read than cells cut into pieces
_UNITS = ("kB", "MB", "GB", "TB")


def brief(reason: object, longest: int = LONGEST) -> str:
    """Return ``reason`` without source locations and very long words, in at most ``longest`` characters."""
    # Cut first: on a word of 70,000 characters the search for places takes 6 s and holds the GIL.
    text = _FRAMES.sub("", without_long_words(str(reason)[:_READ]))
    text = _LOADED.sub("", _CODE.sub(r"\1: ", text))
    if _ASSERTED in text:
        lines = text.splitlines()
        text = "\n".join("an assertion inside PyTorch failed" if _ASSERTED in line else line for line in lines)
    text = _without_addresses(_FAILED.sub(r"\1 '\2': ", _PLACE.sub("", text)))
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def without_long_words(text: str) -> str:
    """Return ``text`` with the middle cut out of words of hundreds of characters, which come from damage or attacks."""
    return _LONG.sub(lambda word: f"{word[0][:_KEPT]}…{word[0][-_KEPT:]}", text)


def first_line(error: Exception) -> str:
    """Return the first line of ``error``, or its type if it has no text."""
    return _without_addresses((str(error).strip().splitlines() or [type(error).__name__])[0])


def _without_addresses(text: str) -> str:
    return _ADDRESS.sub("…", _UNIT.sub("", text))


def os_error_text(error: OSError) -> str:
    """Return the system's message for ``error``; a PermissionError's names the user, who may own none of the files."""
    message = error.strerror or str(error)
    return f"{message} to user {os.geteuid()}" if isinstance(error, PermissionError) else message


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Return the first ``most`` of ``names``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def with_similar(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``name`` in quotes, and the most similar of ``known``, if there is one; ``prefix`` is before all."""
    by_lower = {each.lower(): each for each in known}
    similar = difflib.get_close_matches(name.lower().removeprefix(prefix.lower()), by_lower, 1, _SIMILAR)
    return quoted(name) + (f" (did you mean {prefix}{by_lower[similar[0]]}?)" if similar else "")


def unknown_names(what: str, names: Sequence[str], known: Collection[str]) -> str:
    """Return ``unknown key 'grpc-port' (did you mean grpc_port?)``; all ``known`` too if one is like none of them."""
    shown = [with_similar(name, known) for name in names]
    rest = "" if all(text.endswith(")") for text in shown) else f"; known {what}s are {', '.join(sorted(known))}"
    return f"unknown {what}{'s'[: len(names) != 1]} {first_few(shown)}{rest}"


def quoted(value: object) -> str:
    """Return the start of a value from outside for a message: text in quotes, with control characters escaped.

    A peer may send 64 MiB, and a list may hold itself a thousand times: only the parts that are shown are looked at.
    """
    if isinstance(value, str):
        return repr(value) if len(value) <= _QUOTED else f"{value[:_QUOTED]!r}…"
    text = _SHORT.repr(value)
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxother, _SHORT.maxstring, _SHORT.maxlong = 3, _QUOTED, _QUOTED, _QUOTED


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table under ``title``; floats are shown with three digits, None as a dash."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in drawn.columns:
        column.overflow = "fold"
    for row in rows:
        drawn.add_row(*(Text(_cell(value)) for value in row))
    stream = io.StringIO()
    width = max(_NARROWEST, shutil.get_terminal_size().columns)
    Console(file=stream, no_color=True, width=width, force_jupyter=False).print(drawn)
    lines = stream.getvalue().rstrip().splitlines()
    return "\n".join([title, *(line.rstrip() for line in lines)])  # rich would wrap its own title at the table's width


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the same in HTML without colours, so that it suits a light page and a dark one."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(_cell(each))}</td>' for each in row)}</tr>" for row in rows)
    caption = f'<caption style="text-align: left; font-weight: bold">{html.escape(title)}</caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def listed(names: Sequence[str]) -> str:
    """Join one or more names for a sentence: ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def printable(text: str, keep: str = "\n") -> str:
    """Escape every control character in ``text`` that is not in ``keep``, because the names in it may be hostile."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def size(count: float) -> str:
    """Format a number of bytes for users: ``90.9 MB``."""
    if count < 1000:
        return f"{count:.0f} bytes"
    power = min(int(math.log10(count) // 3), len(_UNITS))
    return f"{count / 1000**power:.1f} {_UNITS[power - 1]}"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else printable(str(value), keep="")


def plain(value: Any) -> Any:
    """Return ``value``, also of dataclasses and pydantic's models, in JSON's own types and with the names in the code.

    Floats that are not finite become the strings ``"inf"``, ``"-inf"``, ``"nan"``.
    """
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    unknown = isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if unknown else value


def dumps(value: Any) -> str:
    """Return ``value`` as JSON text with sorted keys, in ASCII: no name sends control characters to a terminal."""
    return json.dumps(plain(value), sort_keys=True, indent=1, allow_nan=False)


def parse_json(data: bytes, error: type[Bf16kitError], where: object) -> Any:
    """Return the value in ``data``, in UTF-8; raise ``error``, which begins with ``where``, if it is not JSON."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise error(f"{where}: not JSON") from None
