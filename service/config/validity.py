"""Reads validity and names of the server's certificate as a client sees them, by a handshake in memory."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from bf16kit.messages.errors import ConfigError
from service.config.certificates import Certificates

_MAX_ROUNDS = 10  # at most; a TLS handshake has three or four


def valid_until(certificates: Certificates) -> datetime:
    """Return the end of the certificate's validity. Raises ConfigError for one that is expired or not valid yet.

    The handshake's client trusts this very certificate: whether real clients trust its issuer is not checked.
    """
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(_client_view(certificates)["notAfter"]), UTC)


def name_of(certificates: Certificates) -> str:
    """Return a name or address of the certificate.

    Raises ConfigError if there is none, or as :func:`valid_until` does.
    """
    peer_certificate = _client_view(certificates)
    names = [name for kind, name in peer_certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    common = [value for part in peer_certificate.get("subject", ()) for key, value in part if key == "commonName"]
    if not names and not common:
        raise ConfigError("tls_certificate: names no host, so no client would accept it; replace it")
    return str((names or common)[0]).replace("*", "any", 1)


def _client_view(certificates: Certificates) -> Mapping[str, Any]:
    """Return the certificate as :meth:`ssl.SSLSocket.getpeercert` shows it to a client that trusts it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificates.certificate.decode("ascii"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server)
    server = certificates.context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(_MAX_ROUNDS):
            if all([_step(client), _step(server)]):
                break
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or error.reason or "the handshake failed"
        raise ConfigError(f"tls_certificate: no client would accept it: {reason}; replace it") from None
    peer_certificate = client.getpeercert()
    if not peer_certificate or "notAfter" not in peer_certificate:
        raise ConfigError("tls_certificate: a TLS handshake with it never ends; replace it")
    return peer_certificate


def _step(side: ssl.SSLObject) -> bool:
    """Continue the handshake of one side; return whether it is finished."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
