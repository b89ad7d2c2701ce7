"""Bytes to send to a port, generated from a number: noise, and invalid or unfinished HTTP/2, HTTP/1 and TLS."""

import struct
from collections.abc import Callable
from random import Random

import messages
from rawgrpc import framed

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RST, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(10)
_TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(200))
_PATHS = (messages.INFER, messages.STREAM, messages.WATCH, messages.REFLECTION, "/grpc.health.v1.Health/Check", "/", "")
_FIELDS = (
    (":method", "GET"), (":method", ""), (":path", "*"), (":scheme", "gopher"), (":status", "200"), ("te", "gzip"),
    ("content-type", "text/html"), ("content-type", "application/grpc+json"), ("grpc-timeout", "99999999999H"),
    ("grpc-timeout", "-1S"), ("grpc-timeout", "1n"), ("grpc-timeout", "x"), ("grpc-encoding", "gzip"),
    ("grpc-encoding", "nobody"), ("grpc-accept-encoding", "\0"), ("Upper", "case"), ("x-bin", "!not base64!"),
    ("x", "\r\ny: 1"), ("", "nameless"), ("connection", "close"), ("content-length", "-1"), ("x", "v" * 9000),
)  # fmt: skip
_PAGE = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
_HTTP = (
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\nx",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n", b"GET /metrics\r\n\r\n", b"GET  / HTTP/1.1\r\n\r\n", b"\r\n" * 500,
    b"GET / HTTP/1.1\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMA\r\n\r\n",
    b"GET http://elsewhere/ HTTP/1.1\r\nHost: x\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff\xfe?%00%zz HTTP/1.1\r\nHost: x\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
)  # fmt: skip


def grpc_bytes(number: int) -> bytes:
    """Return bytes for the gRPC port, rarely more than 30 KB."""
    return _one_of(_FOR_GRPC, number)


def http_bytes(number: int) -> bytes:
    """Return bytes for the HTTP port."""
    return _one_of(_FOR_HTTP, number)


def frame(kind: int, flags: int, stream: int, body: bytes, size: int | None = None) -> bytes:
    """Return an HTTP/2 frame. ``size`` is the length in its header if it must differ from the body's."""
    size_field = len(body) if size is None else size
    return size_field.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _noise(rng: Random) -> bytes:
    return rng.randbytes(rng.choice((1, 9, 24, 100, 2000)))


def _cut_preface(rng: Random) -> bytes:
    return _PREFACE[: rng.randrange(len(_PREFACE))] + _noise(rng)


def _no_http2(rng: Random) -> bytes:
    return rng.choice((*_HTTP, _TLS_HELLO, _PAGE % b"livez"))


def _noise_in_http2(rng: Random) -> bytes:
    return _BEGUN + _noise(rng)


def _frames(rng: Random) -> bytes:
    return _BEGUN + b"".join(_some_frames(rng) for _ in range(rng.randint(1, 8)))


def _no_http1(rng: Random) -> bytes:
    return rng.choice((_PREFACE + _some_frames(rng), _TLS_HELLO, framed(_noise(rng))))


def _page(rng: Random) -> bytes:
    return rng.choice((*_HTTP, *(_PAGE % page for page in (b"", b"metrics", b"livez", b"readyz", b"nobody"))))


def _pages(rng: Random) -> bytes:
    return _page(rng) * rng.randint(1, 30)


def _damaged_page(rng: Random) -> bytes:
    damaged = bytearray(_page(rng))
    for _ in range(rng.randint(0, 6)):
        at = rng.randrange(len(damaged) + 1)
        damaged[at : at + rng.choice((0, 1, 4))] = rng.choice(
            (b"", rng.randbytes(3), b"\r\n", b"\0", b":", b"a" * 2000)
        )
    return bytes(damaged)


def _some_frames(rng: Random) -> bytes:
    return rng.choice(_FRAMES)(rng, rng.choice((1, 1, 3, 5, 0, 2, 2**31 - 1)))


def _any(rng: Random, stream: int) -> bytes:
    body = rng.randbytes(rng.choice((0, 1, 4, 5, 6, 8, 100)))
    size = rng.choice((None, None, 0, 2**14 + 1, 2**24 - 1))
    return frame(rng.randrange(16), rng.getrandbits(8), stream | rng.getrandbits(1) << 31, body, size)


def _call(rng: Random, stream: int) -> bytes:
    """Return a call whose headers, message, or message length may be invalid."""
    data = rng.choice(messages.attempt(rng.getrandbits(24)).messages or (b"",))[:20_000]
    message = rng.choice(
        (framed(data), framed(data)[:-3], b"\1" + framed(data)[1:], b"\xff" + framed(data)[1:],
         b"\0\xff\xff\xff\xff" + data, b"\0\0\0\0\0" * 100, data)
    )  # fmt: skip
    flags, ended = rng.choice((4, 4, 4, 0, 5, 12, 36)), rng.choice((1, 1, 0))
    sent = b"".join(frame(_DATA, ended if at + 16_384 >= len(message) else 0, stream, message[at : at + 16_384])
                    for at in range(0, len(message), 16_384))  # fmt: skip
    return frame(_HEADERS, flags, stream, _headers(rng)) + sent


def _headers(rng: Random) -> bytes:
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", rng.choice(_PATHS)), (":authority", "x"),
        ("te", "trailers"), ("content-type", "application/grpc"),
    ]  # fmt: skip
    if rng.random() < 0.6:
        fields[rng.randrange(len(fields) + 1) :][:1] = [rng.choice(_FIELDS)]
        fields.insert(rng.randrange(len(fields) + 1), rng.choice(_FIELDS))
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    return block if rng.random() < 0.8 else block[: rng.randrange(len(block))] + rng.randbytes(20)


def _text(text: str) -> bytes:
    """Return ``text`` as an HPACK string without Huffman coding."""
    data = text.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    left = len(data) - 127
    size = bytearray((127,))
    while left > 127:
        size.append(left & 127 | 128)
        left >>= 7
    return bytes((*size, left)) + data


def _settings(rng: Random, stream: int) -> bytes:
    pairs = [(rng.randrange(9), rng.choice((0, 1, 100, 2**14, 2**24, 2**31 - 1, 2**31, 2**32 - 1))) for _ in range(20)]
    return frame(_SETTINGS, rng.choice((0, 0, 1)), 0, b"".join(struct.pack("!HI", *pair) for pair in pairs))


def _window(rng: Random, stream: int) -> bytes:
    return frame(_WINDOW, 0, rng.choice((0, stream)), struct.pack("!I", rng.choice((0, 1, 2**31 - 1, 2**32 - 1)))) * 3


def _flood(rng: Random, stream: int) -> bytes:
    """Return 100 frames of a few bytes each."""
    kind = rng.choice((_PRIORITY, _RST, _PING, _CONTINUATION, _PUSH, _GOAWAY, _SETTINGS))
    size = {_PRIORITY: 5, _RST: 4, _PING: 8, _GOAWAY: 8, _SETTINGS: 0}.get(kind, 3)
    return frame(kind, 0, stream if kind < _SETTINGS else 0, bytes(size)) * 100


_FRAMES: tuple[Callable[[Random, int], bytes], ...] = (_any, _call, _call, _call, _settings, _window, _flood)
_BEGUN = _PREFACE + frame(_SETTINGS, 0, 0, b"")
_FOR_GRPC = (_noise, _cut_preface, _no_http2, _noise_in_http2, _frames, _frames, _frames, _frames)
_FOR_HTTP = (_noise, _no_http1, _pages, _damaged_page, _damaged_page, _damaged_page)


def _one_of(makers: tuple[Callable[[Random], bytes], ...], number: int) -> bytes:
    rng = Random(number)
    return rng.choice(makers)(rng)
