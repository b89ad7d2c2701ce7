"""Damage the bytes of a protobuf message: a peer may send bytes that no library writes."""

from collections.abc import Callable
from random import Random

Edit = Callable[[Random, bytes], bytes]
_VARINT, _FIXED64, _BYTES, _BEGIN, _END, _FIXED32 = range(6)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def field(number: int, data: bytes) -> bytes:
    """Return a field of wire type 2: a string, bytes, a message, or packed numbers."""
    return varint(number << 3 | _BYTES) + varint(len(data)) + data


def _truncated(rng: Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flipped(rng: Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 8) if data else 0):
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _cut_out(rng: Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.randint(1, 16) :]


def _repeated(rng: Random, data: bytes) -> bytes:
    """Repeat every field two to four times: the last singular value wins, repeated fields grow, messages merge."""
    return data * rng.randint(2, 4)


def _spliced(rng: Random, data: bytes) -> bytes:
    at, other = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    return data[:at] + data[other : other + rng.randint(1, 64)] + data[at:]


def _unknown(rng: Random, data: bytes) -> bytes:
    number = rng.choice((8, 99, 1000, 2**29 - 1))
    some = {
        _VARINT: varint(rng.getrandbits(64)),
        _FIXED64: rng.randbytes(8),
        _BYTES: field(number, rng.randbytes(rng.randrange(64)))[len(varint(number << 3 | _BYTES)) :],
        _FIXED32: rng.randbytes(4),
    }
    kind = rng.choice(tuple(some))
    return data + (varint(number << 3 | kind) + some[kind]) * rng.choice((1, 3, 1000))


def _nested(rng: Random, data: bytes) -> bytes:
    """Append nested groups of a field that no message has."""
    depth = rng.choice((1, 10, 99, 100, 101, 5000))
    opened, closed = varint(99 << 3 | _BEGIN), varint(99 << 3 | _END)
    return data + opened * depth + closed * rng.choice((depth, depth - 1, 0))


def _russian_dolls(rng: Random, data: bytes) -> bytes:
    """Append nested length-delimited fields, with a field number that most messages have."""
    inner, number = data[:64], rng.choice((1, 2, 3, 4, 5, 6, 7))
    for _ in range(rng.choice((2, 20, 200))):
        inner = field(number, inner)
    return data + inner


def _malformed(rng: Random, data: bytes) -> bytes:
    return data + rng.choice(
        (
            b"\x00\x01",  # field 0
            b"\x0e", b"\x0f",  # wire types 6 and 7
            b"\x0c",  # the end of a group without a start
            b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # lengths past the end
            b"\x08" + b"\xff" * 10, b"\x08" + b"\x80" * 11 + b"\x01",  # numbers of more than 64 bits
            b"\xff" * 5,  # a tag of more than 32 bits
            b"\x0a\x01\xff", b"\x0a\x03\xed\xa0\x80", b"\x0a\x02\xc0\x80",  # strings that are not UTF-8
        )
    )  # fmt: skip


def _noise(rng: Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((1, 2, 7, 64, 1000)))


EDITS: tuple[Edit, ...] = (
    _truncated, _flipped, _cut_out, _repeated, _spliced, _unknown, _nested, _russian_dolls, _malformed, _noise,
)  # fmt: skip


def damaged(rng: Random, data: bytes) -> bytes:
    """Return ``data`` after one edit, sometimes two."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        data = rng.choice(EDITS)(rng, data)
    return data
