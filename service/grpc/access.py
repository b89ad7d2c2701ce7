"""Authentication and authorisation: TLS for the port, and a token's scope per RPC, checked before a request is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from bf16kit.messages.errors import Forbidden, Unauthenticated
from service.config.certificates import CertificateFiles, Certificates
from service.config.tokens import Scope, TokenFile

Metadata = Sequence[tuple[str, str | bytes]] | None


def server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Return credentials for TLS 1.2 or later. Each new connection gets the files' current certificate.

    With a CA for clients, a connection requires a client certificate of that CA.
    """
    latest = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal latest
        current = files.current()
        if current is latest:
            return None
        latest = current
        return _configuration(current)

    # The stubs omit that None means "unchanged".
    return grpc.dynamic_ssl_server_credentials(_configuration(latest), changed, files.mutual_tls)  # type: ignore[arg-type]


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.certificate)
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca)


@dataclass(frozen=True, slots=True)
class RequiredScope:
    """The requirement of a call: one of ``tokens`` with this ``scope``. If either is None, there is no requirement."""

    tokens: TokenFile | None = None
    scope: Scope | None = None

    def check(self, authorization: str | bytes | None) -> None:
        """Check the metadata ``authorization`` of a call.

        Raises :class:`Unauthenticated` without a known token, and :class:`Forbidden` without the scope.
        """
        if self.tokens is None or self.scope is None:
            return
        scopes = self.tokens.scopes(authorization) if isinstance(authorization, str) else None
        if scopes is None:
            text = "this call needs a valid token: send metadata 'authorization: Bearer …'"
            raise Unauthenticated(text, "unauthenticated")
        if self.scope not in scopes:
            raise Forbidden(f"the token lacks the scope {self.scope!r}, which this call needs", "forbidden")
