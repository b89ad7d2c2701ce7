"""Server containers with a wrong configuration: each logs one line with the reason, and Docker reports its state.

The containers start together, because each takes some seconds to get its health status.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from composing import IMAGE, ROOT, Container, Stack, docker, output_of
from steadyload import sentence
from waiting import until

pytestmark = pytest.mark.compose
_SMALL = "112m"  # less than a server and MiniLM take together
_NARROW = "208m"  # enough for them, and too little for the fp32 reference in addition
_NEWER = """
import json, pathlib
for name, version in (('newer', 99), ('nonsense', 0)):
    target = pathlib.Path('/models', name, '1')
    target.mkdir(parents=True)
    manifest = json.loads(pathlib.Path('/from/minilm/1/manifest.json').read_text())
    (target / 'manifest.json').write_text(json.dumps(manifest | {'schema_version': version}))
"""
Refused = dict[str, Container]


@pytest.fixture(scope="module")
def refused(stack: Stack) -> Iterator[Refused]:
    """Yield the containers by what is wrong with each."""
    models = f"{stack.project}_models"
    other = f"{stack.project}_other"
    shared = ("--volume", f"{models}:/models:ro")
    serve = ("--repository", "/models", "--host", "0.0.0.0")
    output_of(docker("volume", "create", "--label", f"com.docker.compose.project={stack.project}", other))
    try:
        from_to = ("--volume", f"{models}:/from:ro", "--volume", f"{other}:/models")
        output_of(docker("run", "--rm", "--entrypoint", "python", *from_to, f"{IMAGE}:converter", "-c", _NEWER))
        with contextlib.ExitStack() as containers:
            yield {
                name: containers.enter_context(Container(*arguments, options=options))
                for name, arguments, options in (
                    ("no volume", serve, ()),
                    ("no directory", ("--repository", "/nowhere"), ()),
                    ("no GPU", (*serve, "--device", "cuda:0"), shared),
                    ("other schemas", serve, ("--volume", f"{other}:/models:ro")),
                    ("too little memory", serve, (*shared, "--memory", _SMALL, "--memory-swap", _SMALL)),
                    (
                        "no room for the reference",
                        serve,
                        (*shared, "--memory", _NARROW, "--memory-swap", _NARROW, "--publish", "127.0.0.1:0:8001"),
                    ),
                )
            }
    finally:
        docker("volume", "rm", "--force", other)


def judged(container: Container, *words: str) -> None:
    """Assert that the container runs, is unhealthy for Docker, and its log has a line with all ``words``."""

    def said() -> bool:
        assert container.state["Running"], container.log
        return any(all(word in line for word in words) for line in container.log.splitlines())

    until(said, 60, f"a line with {words}")
    until(lambda: container.health == "unhealthy", 60, "Docker's verdict")
    assert container.state["Running"]
    assert not container.state["OOMKilled"]
    assert "Traceback" not in container.log


def ended(container: Container, code: int, *words: str) -> None:
    until(lambda: not container.state["Running"], 60, "its end")
    assert container.state["ExitCode"] == code
    (line,) = [line for line in container.log.splitlines() if line.startswith("bf16-serve: ")]
    assert all(word in line for word in words), line
    assert "Traceback" not in container.log


def test_without_a_volume_the_repository_is_empty(refused: Refused) -> None:
    judged(
        refused["no volume"], "WARNING", "repository /models is empty: serving, but not ready", "put artifacts under"
    )


def test_a_repository_that_does_not_exist_ends_the_server(refused: Refused) -> None:
    ended(refused["no directory"], 2, "'/nowhere' is not a directory", "--repository")


def test_a_missing_gpu_is_not_replaced_by_the_cpu(refused: Refused) -> None:
    judged(refused["no GPU"], "ERROR", "cuda:0", "minilm")


def test_artifacts_of_unknown_schemas_are_rejected(refused: Refused) -> None:
    container = refused["other schemas"]
    judged(container, "ERROR", "/models/newer/1/manifest.json: schema version 99 is newer than", "upgrade bf16kit")
    judged(container, "ERROR", "/models/nonsense/1/manifest.json: schema_version is 0, expected 1 to")


def test_a_model_larger_than_the_containers_memory_is_rejected_before_loading(refused: Refused) -> None:
    words = ("MB of memory at least", "that this container may take; raise the container's")
    judged(refused["too little memory"], "ERROR", "minilm", *words)


def test_without_memory_for_the_reference_the_model_serves_and_the_log_reports_it(
    refused: Refused,
) -> None:
    container = refused["no room for the reference"]
    until(lambda: container.health == "healthy", 60, "readiness")
    address = output_of(docker("port", container.id, "8001")).splitlines()[0]
    with triton.InferenceServerClient(address) as client:

        def asked() -> bool:
            client.infer("minilm", sentence())
            return "no live drift" in container.log

        until(asked, 120, "the reason")
    assert container.state["Running"]
    assert not container.state["OOMKilled"]


def test_compose_names_the_port_in_use(stack: Stack) -> None:
    """The test starts a second project on the same ports."""
    second = Stack.new(f"{stack.project}-second", GRPC_PORT=stack.environment["GRPC_PORT"])
    try:
        done = second.run("up", "--detach", "--no-deps", "server")
        assert done.returncode != 0
        assert f"127.0.0.1:{stack.environment['GRPC_PORT']}" in done.stderr
        assert "already allocated" in done.stderr or "already in use" in done.stderr
    finally:
        second.down()
    assert not second.left()


def test_compose_reports_a_missing_gpu(stack: Stack, tmp_path: Path) -> None:
    """Docker rejects the container before the server starts, because it has no driver for the reserved device."""
    if docker("run", "--rm", "--gpus", "1", "--entrypoint", "python", f"{IMAGE}:server", "-V").returncode == 0:
        pytest.skip("this machine has a GPU")
    second = Stack.new(f"{stack.project}-gpu", IMAGE=f"{IMAGE}-of-the-test").and_file(ROOT / "compose.gpu.yaml")
    output_of(docker("tag", f"{IMAGE}:server", f"{IMAGE}-of-the-test:server-gpu"))
    try:
        done = second.run("up", "--detach", "--no-build", "--no-deps", "server")
        assert done.returncode != 0
        assert "could not select device driver" in done.stderr
        assert "gpu" in done.stderr
    finally:
        second.down()
        docker("rmi", f"{IMAGE}-of-the-test:server-gpu")
    assert not second.left()
