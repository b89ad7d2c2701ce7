"""The server's TLS certificate, its key, and the CA that clients' certificates come from: files, re-read on change."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from bf16kit.errors import ConfigError
from bf16kit.wording import refused
from service.process.files import Watched

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Certificates:
    """What the files held at one moment, as PEM; the key stays out of every repr.

    ``context`` is for servers that speak TLS through :mod:`ssl`: TLS 1.2 or later, and a client's certificate asked for
    and checked where there is a ``client_ca``, but not demanded: who demands one looks whether there is one.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    context: ssl.SSLContext = field(repr=False, compare=False)


class CertificateFiles:
    """The files, and what they hold. Raises :class:`ConfigError` for files that cannot be used together.

    Files that are replaced are read again within a second; a certificate that does not fit its key, as between two
    writes, leaves the old pair in force and a line in the log.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        paths = (certificate, key) if client_ca is None else (certificate, key, client_ca)
        self._watched = Watched(paths, self._load, self._keep)

    @property
    def asks_clients(self) -> bool:
        """Whether clients show certificates too (mTLS)."""
        return self._client_ca is not None

    def current(self) -> Certificates:
        """The same object until the files change."""
        return self._watched.current()

    def _load(self) -> Certificates:
        certificate = _read("tls_certificate", self._certificate)
        key = _read("tls_key", self._key)
        client_ca = None if self._client_ca is None else read_authority("tls_client_ca", self._client_ca)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # An encrypted key would ask the terminal for its password; the empty one makes it fail instead.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls_certificate {self._certificate} and tls_key {self._key} cannot be used: {_reason(error)};"
                " give a PEM certificate (with its chain) and its own key, unencrypted"
            ) from None
        if client_ca is not None:
            context.load_verify_locations(cadata=client_ca.decode("ascii"))
            context.verify_mode = ssl.CERT_OPTIONAL
        _log.debug("TLS certificate read from %s", self._certificate)
        return Certificates(certificate, key, client_ca, context)

    def _keep(self, error: Exception) -> None:
        _log.error("the TLS files changed and cannot be used; the old ones stay in force: %s", error)


def read_authority(key: str, path: Path) -> bytes:
    """The certificates (PEM) of those who certify others. Raises ConfigError, naming ``key``, for what holds none."""
    certificates = _read(key, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificates.decode("ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} {path} cannot be used: {_reason(error)}; give PEM certificates") from None
    return certificates


def _read(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key} {path}: cannot be read: {refused(error)}") from None


def _reason(error: Exception) -> str:
    """What OpenSSL says, without its file and line; never what the file holds."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    if isinstance(error, ssl.SSLError):
        return "they are not PEM files"
    return error.strerror or "an error without a text" if isinstance(error, OSError) else "it is not PEM text"
