"""The HTTP port with inference beside a gRPC port of :mod:`loopback`, and what clients without a library send it."""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from loopback import Served

from bf16kit.service.config.tokens import TokenFile
from bf16kit.service.http.httpserver import HttpServer, Limits
from bf16kit.service.http.pages import Access
from bf16kit.service.rest.restapp import RestApp

Answer = tuple[int, Any, http.client.HTTPMessage]  # its status, its JSON or bytes, its headers


@dataclass
class RestPort:
    """An HTTP port on this machine."""

    port: int

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request over a new connection."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, dict(headers or {}))
            with closing(connection.getresponse()) as response:  # which has the socket if the server closes it
                return answer_of(response)

    def infer(self, asked: object, model: str = "echo", **headers: str) -> Answer:
        """Send JSON, or the bytes of a body."""
        body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
        return self.ask("POST", f"/v2/models/{model}/infer", body, headers)

    def begin(self, body: bytes, length: int | None = None, model: str = "echo") -> socket.socket:
        """Send a request's headers and ``body``, of which ``length`` bytes are announced; return the connection."""
        peer = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        announced = f"Content-Length: {len(body) if length is None else length}"
        peer.sendall(f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\n{announced}\r\n\r\n".encode() + body)
        return peer


def answer_of(response: http.client.HTTPResponse) -> Answer:
    body = response.read()
    is_json = response.headers.get_content_type() == "application/json"
    return response.status, json.loads(body) if is_json and body else body, response.headers


def read_answer(peer: socket.socket) -> Answer:
    """Read the response on a connection of :meth:`RestPort.begin`, and close that."""
    with peer, closing(http.client.HTTPResponse(peer)) as response:
        response.begin()
        return answer_of(response)


@contextmanager
def resting(
    served: Served, *, tokens: TokenFile | None = None, max_bytes: int = 64 << 20, **limits: Any
) -> Iterator[RestPort]:
    """Run an HTTP port whose inference shares the models and limits of ``served``."""
    access = Access(tokens)
    server = HttpServer("127.0.0.1", 0, {}, access=access, limits=Limits(**limits), on_refused=served.log.refused)
    server.answer_inference(RestApp(served.transport, access, max_bytes))
    server.start()
    try:
        yield RestPort(server.port)
    finally:
        server.close()
