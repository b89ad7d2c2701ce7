"""Parses a repository's JSON within bounds.

Python builds up to 30 bytes of objects from each byte, in one step for which all other threads wait.
"""

from __future__ import annotations

import json
from typing import Any

from bf16kit.messages.errors import Bf16kitError
from bf16kit.messages.wording import quoted

MOST_VALUES = 1_250_000  # a manifest with 10,000 tensors and 40,000 nodes in each of three profiles has 1,020,000
_LONGEST_INTEGER = 20  # characters: a sign and 64 bits
LARGEST_INTEGER = (1 << 63) - 1


def parse(data: bytes, error: type[Bf16kitError], where: object, most: int = MOST_VALUES) -> Any:
    """Return the value in ``data``, in UTF-8. ``where`` names its origin in messages.

    Raises ``error`` for anything but JSON, for more than ``most`` values, and for an integer of more than 64
    bits. The caller bounds the bytes.
    """
    values = data.count(b",") + data.count(b"[") + data.count(b"{")  # at least as many as there are
    if values > most:
        raise error(f"{where}: has {values} commas and brackets, the limit is {most}; write the file again")

    def integer(digits: str) -> int:
        if len(digits) > _LONGEST_INTEGER or not -LARGEST_INTEGER - 1 <= (value := int(digits)) <= LARGEST_INTEGER:
            raise error(
                f"{where}: has the number {quoted(digits)}, the limit is {LARGEST_INTEGER}; write the file again"
            )
        return value

    try:
        return json.loads(data.decode("utf-8"), parse_int=integer)
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise error(f"{where}: not JSON") from None
