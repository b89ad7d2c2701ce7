"""Checks that have crashed servers: they run last, and only with ``--dangerous``."""

from __future__ import annotations

import os

from oip_conformance.checks.regions import NEEDS, region, request_with_region
from oip_conformance.checks.sources import OIP
from oip_conformance.session import Session
from oip_conformance.suite import MUST, Skipped, check, must

_RULE = "Errors are indicated by the google.rpc.Status returned for the request: the server must survive to return it."


def _allowed(session: Session) -> None:
    if not session.options.dangerous:
        raise Skipped("it has ended servers; --dangerous tries it")


@check("danger.classes-of-strings", MUST, OIP, f"{_RULE} Classification of a BYTES output.", "classification")
def classes_of_strings(session: Session) -> None:
    _allowed(session)
    model, name = session.with_output("BYTES")
    request = session.request(model, outputs=[name])
    request.outputs[0].parameters["classification"].int64_param = 1
    response = session.target.call(request)
    session.alive()
    must(not response.ok, "a rejection", response, request)


@check(
    "danger.region-shrunk", MUST, OIP, f"{_RULE} A region whose memory was cut short after it was registered.", NEEDS
)
def region_shrunk(session: Session) -> None:
    _allowed(session)
    with region(session) as memory:
        request = request_with_region(memory, offset=8192)
        session.infer(request)
        os.truncate(memory.path, 4096)
        response = session.target.call(request)
        session.alive()
        must(not response.ok, "a rejection", response, request)
