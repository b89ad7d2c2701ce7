"""What both ports prove, and what they ask of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from service.process.certificates import CertificateFiles
from service.process.config import ServerConfig
from service.process.tokens import TokenFile


@dataclass(frozen=True, slots=True)
class Credentials:
    """Each None where the configuration names no file."""

    certificates: CertificateFiles | None = None
    tokens: TokenFile | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """Raises ConfigError for files that cannot be used."""
        return cls(certificates_of(config), tokens_of(config))


def certificates_of(config: ServerConfig) -> CertificateFiles | None:
    """Raises ConfigError for files that cannot be used together."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    return CertificateFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)


def tokens_of(config: ServerConfig) -> TokenFile | None:
    """Raises ConfigError for a file that cannot be used."""
    return None if config.token_file is None else TokenFile(config.token_file)
