"""Checks that something listens at the address of a Ray cluster; Ray itself waits for minutes when nothing does."""

from __future__ import annotations

import socket

_SECONDS = 5.0
_LAST_PORT = 65_535


def check_reachable(address: str) -> None:
    """Raise OSError if ``address`` is HOST:PORT and nothing listens there.

    Other addresses are not checked, such as "auto" or ray://HOST:PORT: Ray gives up on those by itself.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    if int(port) > _LAST_PORT:
        raise OSError(f"port {port} is over {_LAST_PORT}")
    socket.create_connection((host.removeprefix("[").removesuffix("]"), int(port)), _SECONDS).close()
