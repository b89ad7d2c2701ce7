"""The credentials of both ports: the server's certificates, and the tokens that clients need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from service.config.certificates import CertificateFiles
from service.config.serverconfig import ServerConfig
from service.config.tokens import TokenFile


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
