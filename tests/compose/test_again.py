"""A second ``up`` leaves a running stack unchanged, and a restart loses no accepted request."""

import re
import signal

import pytest
from composing import IMAGE, SERVICES, Stack, docker, output_of
from steadyload import SteadyLoad
from waiting import until

pytestmark = pytest.mark.compose
_REQUEST = re.compile(r"request (?:not )?answered .*?\brequest_id=\"?([\w/-]+)\"? code=(\w+)")
_FILES = """
import pathlib
for file in sorted(pathlib.Path('/models').rglob('*')):
    seen = file.stat()
    print(file, seen.st_ino, seen.st_size, seen.st_mtime_ns)
"""


def began(stack: Stack) -> dict[str, tuple[str, str]]:
    """Return the ID and the start time of each container that keeps running."""
    running = (service for service in SERVICES if service != "convert")
    return {
        service: (found["Id"], found["State"]["StartedAt"])
        for service in running
        if (found := stack.container(service))
    }


def test_a_second_up_converts_nothing_and_restarts_nothing(stack: Stack) -> None:
    before, files = began(stack), stack.python(_FILES)
    assert "/models/minilm/1/manifest.json" in files
    stack.up(*SERVICES)
    assert began(stack) == before
    assert stack.python(_FILES) == files
    assert "already exists; remove the volume" in stack.log("convert").splitlines()[-1]


def test_a_restart_under_load_loses_no_accepted_request(stack: Stack) -> None:
    """Rejected requests get UNAVAILABLE; clients that have gRPC wait and retry see no error."""
    with SteadyLoad(stack.target, plain=3, patient=3) as load:
        until(load.more(), 60, "20 answers for each client")
        stack.compose("restart", "server")
        until(load.more(), 60, "20 answers more for each client after the restart")
    log = stack.log("server")
    output_of = dict(_REQUEST.findall(log))
    ran = {request for request, code in output_of.items() if code == "OK"}
    asked = load.answered | load.failed.keys()
    assert len(ran & asked) > 100, "the log has a line for each"
    assert asked & ran <= load.answered, "the server ran these, and nobody got the answer"
    assert [request for request in load.failed if request.startswith("patient")] == []
    assert set(load.failed.values()) <= {"StatusCode.UNAVAILABLE", "StatusCode.CANCELLED"}
    assert {output_of[request] for request in load.failed if request in output_of} <= {"UNAVAILABLE"}
    assert "requests were cut off" not in log
    assert re.search(r"stopped after \d", log)


def test_the_server_stops_cleanly_and_starts_again(stack: Stack) -> None:
    """SIGTERM drains and exits 0; 137 would mean that Docker's timeout ran out."""
    stack.compose("stop", "server")
    state = stack.container("server")["State"]
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)
    stack.compose("start", "server")
    until(lambda: stack.get("/readyz")[0] == 200, 60, "readiness")


def test_a_conversion_that_is_stopped_ends_at_once() -> None:
    """The program is process 1 of its container, which ignores SIGTERM by default.

    Exit code 137 would mean that Docker's timeout ran out.
    """
    if docker("image", "inspect", f"{IMAGE}:converter").returncode != 0:
        pytest.skip(f"the image {IMAGE}:converter is not on this machine")
    hardened = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--volume", "/models")
    publish = ("--entrypoint", "python", f"{IMAGE}:converter", "/opt/demo/publish.py", "/models")
    container = output_of(docker("run", "--detach", *hardened, *publish))
    try:
        until(lambda: "bf16-convert" in docker("top", container).stdout, 60, "a conversion at work")
        output_of(docker("stop", "--time", "30", container))
        assert output_of(docker("inspect", "--format", "{{.State.ExitCode}}", container)) == str(128 + signal.SIGTERM)
    finally:
        docker("rm", "--force", "--volumes", container)
