"""Edits that ignore the file's format: flipped bits, cuts, splices, and extreme numbers written at any position."""

from collections.abc import Callable
from random import Random

Edit = Callable[[bytes, Random], bytes]

EXTREMES = (0, 1, 2**7 - 1, 2**8 - 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def flip(content: bytes, random: Random) -> bytes:
    """Flip one to eight bits. Empty content stays empty."""
    result = bytearray(content)
    for _ in range(random.randint(1, 8) if content else 0):
        position = _early(result, random)
        result[position] ^= 1 << random.randrange(8)
    return bytes(result)


def overwrite(content: bytes, random: Random) -> bytes:
    """Overwrite one to eight adjacent bytes with random bytes."""
    result = bytearray(content)
    position, count = _early(result, random), random.randint(1, 8)
    result[position : position + count] = random.randbytes(count)
    return bytes(result)


def truncate(content: bytes, random: Random) -> bytes:
    """Cut the file at any position, the first bytes included."""
    return content[: random.randrange(len(content) + 1)]


def splice(content: bytes, random: Random) -> bytes:
    """Copy a piece of the file to another position: insert it there, or overwrite what is there."""
    start, length, to = _early(content, random), random.randint(1, 200), _early(content, random)
    piece = content[start : start + length]
    return content[:to] + piece + content[to + (length if random.random() < 0.5 else 0) :]


def remove(content: bytes, random: Random) -> bytes:
    """Remove a piece of 1 to 64 bytes."""
    start = _early(content, random)
    return content[:start] + content[start + random.randint(1, 64) :]


def number(content: bytes, random: Random) -> bytes:
    """Write an extreme number over 1, 2, 4 or 8 bytes."""
    width, position = random.choice((1, 2, 4, 8)), _early(content, random)
    value = random.choice(EXTREMES) % (1 << 8 * width)
    return content[:position] + value.to_bytes(width, random.choice(("little", "big"))) + content[position + width :]


def append(content: bytes, random: Random) -> bytes:
    """Append random bytes, the content itself, or zeros."""
    return content + random.choice((random.randbytes(random.randint(1, 300)), content, bytes(100)))


def special(values: bytes, random: Random) -> bytes:
    """Replace one fp32 number with NaN, infinity, the largest number, the smallest subnormal or -0."""
    number = random.choice((0x7FC00000, 0x7F800000, 0x7F7FFFFF, 0x00000001, 0xFFFFFFFF, 0x80000000))
    position = 4 * random.randrange(len(values) // 4)
    return values[:position] + number.to_bytes(4, "little") + values[position + 4 :]


EDITS: tuple[Edit, ...] = (flip, overwrite, truncate, splice, remove, number, append)


def _early(content: bytes | bytearray, random: Random) -> int:
    """Return a random position, more often near the start or the end, where formats keep their structure."""
    if not content:
        return 0
    last = len(content) - 1
    near = min(last, int(random.expovariate(1 / 150)))
    return random.choice((near, last - near, random.randint(0, last)))
