"""The credentials of both ports: TLS certificate, key, CA for client certificates, tokens. Files are read on change."""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import os_error_text
from bf16kit.service.config.reloadedfiles import ReloadedFiles, read_regular
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.config.tokens import TokenFile

_log = logging.getLogger(__name__)
_LARGEST_FILE = 16 << 20  # bytes: a hundred times the usual bundle of all public authorities
_ROUNDS = 10  # a TLS handshake has three or four


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

    def valid_until(self) -> datetime:
        """Return the end of the certificate's validity. Raises ConfigError for one that no client would accept.

        Whether real clients trust its issuer is not checked.
        """
        return datetime.fromtimestamp(ssl.cert_time_to_seconds(self._client_view()["notAfter"]), UTC)

    def name(self) -> str:
        """Return a name or address of the certificate. Raises ConfigError as :meth:`valid_until` does."""
        view = self._client_view()
        names = [name for kind, name in view.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
        names += [value for part in view.get("subject", ()) for key, value in part if key == "commonName"]
        if not names:
            raise ConfigError("tls_certificate: names no host, so no client would accept it; replace it")
        return str(names[0]).replace("*", "any", 1)

    def _client_view(self) -> Mapping[str, Any]:
        """Return the certificate as a client that trusts this very certificate sees it, by a handshake in memory."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=self.certificate.decode("ascii"))
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(to_client, to_server)
        server = self.context.wrap_bio(to_server, to_client, server_side=True)
        try:
            for side in (client, server) * _ROUNDS:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", None) or error.reason or "the handshake failed"
            raise ConfigError(f"tls_certificate: no client would accept it: {reason}; replace it") from None
        return client.getpeercert() or {}


class CertificateFiles:
    """The TLS files and their contents. Raises :class:`ConfigError` for files that cannot be used together.

    Replaced files are read again within a second or two. If a certificate does not fit its key, as between two writes,
    the old pair stays in force and an error is logged.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        paths = (certificate, key) if client_ca is None else (certificate, key, client_ca)
        self._files = ReloadedFiles("the TLS files", paths, self._load)

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
        client_ca = None if self._client_ca is None else _read_authority(self._client_ca)
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


@dataclass(frozen=True, slots=True)
class Credentials:
    """Certificates and tokens; each is None if the configuration names no file for it."""

    certificates: CertificateFiles | None = None
    tokens: TokenFile | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """Read the files that ``config`` names. Raises ConfigError for files that cannot be used."""
        return cls(certificates_of(config), tokens_of(config))


def certificates_of(config: ServerConfig) -> CertificateFiles | None:
    """Return the server's certificates, or None. Raises ConfigError for files that cannot be used together."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    return CertificateFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)


def tokens_of(config: ServerConfig) -> TokenFile | None:
    """Return the token file, or None. Raises ConfigError for a file that cannot be used."""
    return None if config.token_file is None else TokenFile(config.token_file)


def _read_authority(path: Path) -> bytes:
    certificates = _read("tls_client_ca", path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificates.decode("ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls_client_ca {path} cannot be used: {_openssl_reason(error)}; give PEM certificates"
        ) from None
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
