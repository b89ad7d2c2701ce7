"""Clients of other projects and the real server, one test for each call. The calls are in ``calls_of_….py``."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.clients
_CALL = re.compile(r"^(?:async )?def (\w+)\((?:client|stub): Any\)", re.MULTILINE)
_WRITTEN = {
    client: _CALL.findall((Path(__file__).parent / f"calls_of_{client}.py").read_text("utf-8"))
    for client in ("kserve", "kserve_rest", "mlserver")
}


@pytest.mark.parametrize(("client", "call"), [(client, call) for client in _WRITTEN for call in _WRITTEN[client]])
def test_the_client_gets_the_response_that_it_expects(
    client: str, call: str, calls: Callable[[str], dict[str, str]]
) -> None:
    assert calls(client)[call] == ""


@pytest.mark.parametrize("client", _WRITTEN)
def test_every_call_is_reported(client: str, calls: Callable[[str], dict[str, str]]) -> None:
    assert list(calls(client)) == _WRITTEN[client]
