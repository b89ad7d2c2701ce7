"""Who may call what: TLS for the port, and a token's scope for each RPC, looked at before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import grpc

from bf16kit.errors import Forbidden, Unauthenticated
from service.process.certificates import CertificateFiles, Certificates
from service.process.tokens import Scope, TokenFile

Metadata = Sequence[tuple[str, str | bytes]] | None


def server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """TLS 1.2 or later; each new connection gets the certificate that is in the files then.

    With a CA for clients, no connection is made without a certificate of it.
    """
    latest = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal latest
        current = files.current()
        if current is latest:
            return None
        latest = current
        return _configuration(current)

    # The stubs leave out that None means "as it was".
    return grpc.dynamic_ssl_server_credentials(_configuration(latest), changed, files.asks_clients)  # type: ignore[arg-type]


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.certificate)
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call at all. ``open_to_all``: what needs no token, of ``health`` and ``reflection``."""

    tokens: TokenFile | None = None
    open_to_all: frozenset[str] = frozenset({"health"})

    def scope_of(self, group: Literal["health", "reflection"]) -> Scope | None:
        return None if group in self.open_to_all else "read"


@dataclass(frozen=True, slots=True)
class Needs:
    """What a call has to bring: a token of ``tokens`` with this ``scope``. Either None: nothing."""

    tokens: TokenFile | None
    scope: Scope | None

    def check(self, metadata: Metadata) -> None:
        """Raises :class:`Unauthenticated` without a token that is known, :class:`Forbidden` without the scope."""
        if self.tokens is None or self.scope is None:
            return
        given = next((value for name, value in metadata or () if name == "authorization"), None)
        scopes = self.tokens.scopes(given) if isinstance(given, str) else None
        if scopes is None:
            raise Unauthenticated("this call needs a token that is known: metadata 'authorization: Bearer …'")
        if self.scope not in scopes:
            raise Forbidden(f"the token is not for this: the scope {self.scope!r} is needed")
