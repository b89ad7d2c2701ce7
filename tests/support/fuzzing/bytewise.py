"""Edits that know nothing of a format: flips, cuts, splices, extreme numbers over whatever stood there."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Edit = Callable[[bytes, Random], bytes]

EXTREMES = (0, 1, 2**7 - 1, 2**8 - 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def flip(content: bytes, random: Random) -> bytes:
    """Up to eight bits, each flipped; nothing has none."""
    result = bytearray(content)
    for _ in range(random.randint(1, 8) if content else 0):
        position = _early(result, random)
        result[position] ^= 1 << random.randrange(8)
    return bytes(result)


def overwrite(content: bytes, random: Random) -> bytes:
    """Up to eight bytes of the same place, of any value."""
    result = bytearray(content)
    position, count = _early(result, random), random.randint(1, 8)
    result[position : position + count] = random.randbytes(count)
    return bytes(result)


def truncate(content: bytes, random: Random) -> bytes:
    """The file cut anywhere, its very first bytes included."""
    return content[: random.randrange(len(content) + 1)]


def splice(content: bytes, random: Random) -> bytes:
    """A piece of the file copied to, or moved over, another place."""
    start, length, to = _early(content, random), random.randint(1, 200), _early(content, random)
    piece = content[start : start + length]
    return content[:to] + piece + content[to + (length if random.random() < 0.5 else 0) :]


def remove(content: bytes, random: Random) -> bytes:
    """A piece of the file left out."""
    start = _early(content, random)
    return content[:start] + content[start + random.randint(1, 64) :]


def number(content: bytes, random: Random) -> bytes:
    """An extreme number written over 1, 2, 4 or 8 bytes."""
    width, position = random.choice((1, 2, 4, 8)), _early(content, random)
    value = random.choice(EXTREMES) % (1 << 8 * width)
    return content[:position] + value.to_bytes(width, random.choice(("little", "big"))) + content[position + width :]


def append(content: bytes, random: Random) -> bytes:
    """Bytes behind the end."""
    return content + random.choice((random.randbytes(random.randint(1, 300)), content, bytes(100)))


EDITS: tuple[Edit, ...] = (flip, overwrite, truncate, splice, remove, number, append)


def _early(content: bytes | bytearray, random: Random) -> int:
    """A position, more often near one of the ends: there formats keep their structure."""
    if not content:
        return 0
    last = len(content) - 1
    near = min(last, int(random.expovariate(1 / 150)))
    return random.choice((near, last - near, random.randint(0, last)))
