"""Fetches evidence from the process that keeps it: through anonymous memory, never in a message."""

from __future__ import annotations

import os
from collections.abc import Callable

from bf16kit.messages.errors import NotFound, Unavailable
from service.peers.channel import Body
from service.peers.peer import Message, Peer

EVIDENCE = "evidence"
TIMEOUT_SECONDS = 10.0  # longest wait for a response


def fetch_evidence(peer: Callable[[], Peer | None], model: str, version: int) -> bytes:
    """Return the evidence of the model's newest breach, as the bytes of a file.

    Raises NotFound if there is none, and Unavailable if the process does not answer.
    """
    process = peer()
    if process is None:
        raise NotFound(f"model {model!r} version {version}: no live sample has been measured, so there is no evidence")
    file = os.memfd_create("bf16kit-evidence", os.MFD_CLOEXEC)
    try:
        size = int(process.ask(EVIDENCE, {"model": model, "version": version}, [file]).result(TIMEOUT_SECONDS)["bytes"])
        return os.pread(file, size, 0)
    except TimeoutError:
        raise Unavailable(f"the shadow of this server did not answer within {TIMEOUT_SECONDS:g} s; try again") from None
    finally:
        os.close(file)


def send_evidence(message: Message, evidence: Callable[[str, int], bytes]) -> Body:
    """Respond to a request for evidence, in the process that keeps it: write it to the file sent with the message."""
    body = message.body
    data = evidence(body["model"], int(body["version"]))
    with os.fdopen(os.dup(message.files[0]), "wb") as file:
        file.write(data)
    return {"bytes": len(data)}
