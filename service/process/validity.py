"""Until when a server's certificate is valid, as a client finds out: by a handshake, in memory."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

from bf16kit.errors import ConfigError
from service.process.certificates import Certificates

_FLIGHTS = 10  # a handshake of TLS has three or four


def valid_until(certificates: Certificates) -> datetime:
    """The end of the certificate's validity. Raises ConfigError for one that is over, or has not begun.

    The client trusts this very certificate: whether others trust who signed it is theirs to say.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificates.certificate.decode("ascii"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server)
    server = certificates.context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(_FLIGHTS):
            if all([_step(client), _step(server)]):
                break
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or error.reason or "the handshake failed"
        raise ConfigError(f"tls_certificate: no client would take it: {reason}; replace it") from None
    ends = (client.getpeercert() or {}).get("notAfter")
    if not isinstance(ends, str):
        raise ConfigError("tls_certificate: a handshake with it does not come to an end; replace it")
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(ends), UTC)


def _step(side: ssl.SSLObject) -> bool:
    """Whether this side is done."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
