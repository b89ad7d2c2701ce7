"""Finds the server on this machine from the flags, the environment and server.yaml that it was started with.

This does without :mod:`service.config.serverconfig`: a health check runs every few seconds, and importing the library
that validates the configuration takes longer than the check itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import ConfigError
from service.grpc.healthclient import ClientTls, Endpoint

_PREFIX = "BF16KIT_"
_PORT = 8001
_WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 -- listened on, not by us
_LARGEST_PORT = 65535


class LocalServer:
    """The server's settings, each from its flag, else its variable, else its key in ``file``."""

    def __init__(self, flags: Mapping[str, Any], file: Path | None) -> None:
        """Raises ConfigError for a file that cannot be read."""
        self._flags = flags
        self._from_file = _mapping(file) if file is not None else {}

    def endpoint(self, certificate: Path | None = None, key: Path | None = None) -> Endpoint:
        """Return the server's address and the certificates to use there.

        ``certificate`` and ``key`` are used if the server requires client certificates. Raises ConfigError for settings
        that cannot be used.
        """
        host = self._text("host") or "127.0.0.1"
        host = _WILDCARD_HOSTS.get(host, host)
        target = f"[{host}]:{self._port()}" if ":" in host else f"{host}:{self._port()}"
        return Endpoint(target, self._trust(certificate, key))

    def _setting(self, name: str) -> Any:
        for value in (self._flags.get(name), os.environ.get(_PREFIX + name.upper()), self._from_file.get(name)):
            if value not in (None, ""):
                return value
        return None

    def _text(self, name: str) -> str:
        value = self._setting(name)
        return "" if value is None else str(value)

    def _path(self, name: str) -> Path | None:
        return Path(text) if (text := self._text(name)) else None

    def _port(self) -> int:
        text = self._text("grpc_port") or str(_PORT)
        if not (text.isascii() and text.isdecimal() and 0 < int(text) <= _LARGEST_PORT):
            raise ConfigError(f"grpc_port {text!r}: give the port that the server listens on, 1 to {_LARGEST_PORT}")
        return int(text)

    def _trust(self, certificate: Path | None, key: Path | None) -> ClientTls | None:
        own, own_key, authority = (self._path(f"tls_{name}") for name in ("certificate", "key", "client_ca"))
        if own is None or own_key is None:
            return None
        from service.config.certificates import CertificateFiles
        from service.config.validity import name_of

        pair = CertificateFiles(own, own_key, authority).current()
        name = name_of(pair)
        if authority is None:
            return ClientTls(pair.certificate, name)
        if certificate is None or key is None:
            return ClientTls(pair.certificate, name, pair.certificate, pair.key)
        client = CertificateFiles(certificate, key).current()
        return ClientTls(pair.certificate, name, client.certificate, client.key)


def _mapping(file: Path) -> dict[str, Any]:
    from service.config.serverconfig import read_mapping  # a slow import, needed only if there is a file

    return read_mapping(file)
