"""Whether anybody answers at the address of a Ray cluster: Ray itself asks for minutes where nobody does."""

from __future__ import annotations

import socket

_SECONDS = 5.0
_LAST_PORT = 65_535


def knock(address: str) -> None:
    """Raises OSError where ``address`` is HOST:PORT and nobody listens there. Nothing for what is none, such as "auto"
    or ray://HOST:PORT, which Ray gives up by itself."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    if int(port) > _LAST_PORT:
        raise OSError(f"port {port} is over {_LAST_PORT}")
    socket.create_connection((host.removeprefix("[").removesuffix("]"), int(port)), _SECONDS).close()
