"""One stack for all tests of this directory: a test that changes it must restore it."""

import os
import uuid
from collections.abc import Iterator

import pytest
import tritonclient.grpc as triton
from composing import PORTS, SERVICES, Stack, docker


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Yield the whole stack except Grafana, up and healthy; remove everything that belongs to it afterwards.

    If BF16KIT_COMPOSE_PROJECT names a running stack, with its ports in the environment, use that one and leave it
    running, for developers who work on these tests.
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
