"""One table maps errors to gRPC codes, and the text of unexpected errors does not reach the client."""

from __future__ import annotations

import pytest

from bf16kit.messages import errors
from service.grpc.status import CODES, status_of


def test_every_request_error_has_a_code() -> None:
    refusals = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.RequestError)}
    assert CODES.keys() == refusals - {errors.RequestError}


@pytest.mark.parametrize("kind", list(CODES))
def test_a_request_error_keeps_its_message(kind: type[errors.RequestError]) -> None:
    status = status_of(kind("input 'x' is wrong"))
    assert (status.code, status.details) == (CODES[kind], "input 'x' is wrong")


def test_long_details_are_cut_to_500_characters() -> None:
    assert len(status_of(errors.InvalidRequest("x" * 100_000)).details) == 500
