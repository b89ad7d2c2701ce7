"""The server's TLS certificate, its key, and the CA for client certificates. The files are read again on change."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import os_error_text
from service.config.reloadedfiles import ReloadedFiles, read_regular

_log = logging.getLogger(__name__)
_LARGEST_FILE = 16 << 20  # bytes: a hundred times the usual bundle of all public authorities


@dataclass(frozen=True, slots=True)
class Certificates:
    """The contents of the files at one moment, as PEM. The key is in no repr.

    ``context`` is for servers that use :mod:`ssl`: TLS 1.2 or later. With a ``client_ca``, a client certificate is
    requested and verified but not required; a server that requires one must check for it.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    context: ssl.SSLContext = field(repr=False, compare=False)


class CertificateFiles:
    """The TLS files and their contents. Raises :class:`ConfigError` for files that cannot be used together.

    Replaced files are read again within a second or two. If a certificate does not fit its key, as between two writes,
    the old pair stays in force and an error is logged.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        paths = (certificate, key) if client_ca is None else (certificate, key, client_ca)
        self._files = ReloadedFiles(paths, self._load, self._log_failure)

    @property
    def mutual_tls(self) -> bool:
        """Whether clients are asked for certificates too (mTLS)."""
        return self._client_ca is not None

    def current(self) -> Certificates:
        """Return the contents now; the same object until the files change."""
        return self._files.current()

    def _load(self) -> Certificates:
        certificate = _read("tls_certificate", self._certificate)
        key = _read("tls_key", self._key)
        client_ca = None if self._client_ca is None else read_authority("tls_client_ca", self._client_ca)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # OpenSSL would ask the terminal for the password of an encrypted key; the empty password makes it fail.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls_certificate {self._certificate} and tls_key {self._key} cannot be used: {_openssl_reason(error)};"
                " give a PEM certificate (with its chain) and its own key, unencrypted"
            ) from None
        if client_ca is not None:
            context.load_verify_locations(cadata=client_ca.decode("ascii"))
            context.verify_mode = ssl.CERT_OPTIONAL
        _log.debug("TLS certificate read from %s", self._certificate)
        return Certificates(certificate, key, client_ca, context)

    def _log_failure(self, error: Exception) -> None:
        _log.error("the TLS files cannot be read again; the old ones stay in force: %s", error)


def read_authority(key: str, path: Path) -> bytes:
    """Return the CA certificates (PEM) in ``path``. Raises ConfigError, naming ``key``, for a file without any."""
    certificates = _read(key, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificates.decode("ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} {path} cannot be used: {_openssl_reason(error)}; give PEM certificates") from None
    return certificates


def _read(key: str, path: Path) -> bytes:
    try:
        return read_regular(path, _LARGEST_FILE)[0]
    except OSError as error:
        raise ConfigError(f"{key} {path}: cannot be read: {os_error_text(error)}") from None


def _openssl_reason(error: Exception) -> str:
    """Return OpenSSL's reason, without its source file and line; never the contents of a file."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    if isinstance(error, ssl.SSLError):
        return "they are not PEM files"
    return error.strerror or "an error without a text" if isinstance(error, OSError) else "it is not PEM text"
