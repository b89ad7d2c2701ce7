"""One stack for all tests of this directory: who changes it puts it back."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
import tritonclient.grpc as triton
from composing import PORTS, SERVICES, Stack, docker


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The whole stack but Grafana, up and healthy; taken down with all that is its own, whatever happened.

    Where BF16KIT_COMPOSE_PROJECT names one that is up, with its ports in the environment, that is taken, and left: for
    whoever works on these tests.
    """
    if docker("compose", "ls").returncode != 0:
        pytest.skip("no Docker engine with the compose plugin answers here")
    if (project := os.environ.get("BF16KIT_COMPOSE_PROJECT")) is not None:
        yield Stack(project, {name: os.environ[name] for name in ("IMAGE", "BF16KIT_LOG_LEVEL", *PORTS)})
        return
    stack = Stack.new(f"bf16kit-test-{uuid.uuid4().hex[:8]}")
    try:
        stack.compose("build", "convert", "server")
        stack.up(*SERVICES)
        yield stack
    finally:
        stack.down()
    assert not stack.left()


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(stack.target) as client:
        yield client
