"""The client in docs/kubernetes.md with two servers, whose addresses it gets as from a headless Service."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from manifests import ROOT
from serverprocess import ServerProcess
from waiting import until

pytestmark = pytest.mark.long  # starts two servers, one of which serves for seconds after SIGTERM
ANSWERED = 'bf16kit_requests_total{code="OK",model="mlp",version="1"}'


@pytest.fixture
def servers(repository: Path) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        flags = ("--repository", repository, "--lame-duck-seconds", "2")
        servers = [stack.enter_context(ServerProcess(*flags)) for _ in range(2)]
        yield [server.wait_ready() for server in servers]


def example(target: str) -> Any:
    """Return the client and the function ``infer`` of the page's example, connected to ``target``."""
    page = (ROOT / "docs" / "kubernetes.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    named = "dns:///bf16kit.bf16kit.svc:8001"
    assert code.count(named) == 1
    space: dict[str, Any] = {}
    exec(code.replace(named, target), space)  # the code is from our own documentation
    return space["client"], space["infer"]


def test_calls_are_spread_and_none_is_lost_when_a_server_stops(servers: list[ServerProcess]) -> None:
    client, infer = example("ipv4:" + ",".join(server.target for server in servers))
    with client:
        until(lambda: (infer(), all(server.metric(ANSWERED) >= 10 for server in servers))[1], 60, "both to answer")
        staying, going = servers
        going.terminate()
        while going.process.poll() is None:
            infer()  # returns a response or raises
        assert going.exit_code() == 0
        before = staying.metric(ANSWERED)
        infer()
        assert staying.metric(ANSWERED) == before + 1
