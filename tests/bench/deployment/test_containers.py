"""What a benchmark reads from an engine's output, and that it leaves nothing. The last tests use a real engine."""

from __future__ import annotations

import math
import os
import subprocess
import uuid
from pathlib import Path

import pytest
from engines import FakeDocker
from loopback import LoopbackModel
from loopback import serving as server
from waiting import until

from bench.deployment import containers

HISTORY = """0 LABEL org.opencontainers.image.title=bf16kit server, cpu
0 CMD ["--repository" "/models"]
12345678 COPY /layer / # buildkit
239000000 COPY /layer / # buildkit
0 USER 10001:10001
77000000 /bin/sh -c #(nop) ADD file:0123 in /"""
ID = "f00d" * 16


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    return FakeDocker(tmp_path / "bin", monkeypatch)


def test_only_our_own_layers_are_listed_lowest_first(engine: FakeDocker) -> None:
    engine.set_responses({"history": HISTORY, "inspect": "328345678"})
    assert containers.layer_bytes("i") == [239_000_000, 12_345_678]
    assert containers.image_bytes("i") == 328_345_678


def test_the_engines_error_message_is_reported(engine: FakeDocker) -> None:
    engine.set_responses({"info": (1, "no engine"), "history": (1, "No such image: i")})
    with pytest.raises(RuntimeError, match=r"docker history .* ended with 1:\nNo such image: i"):
        containers.layer_bytes("i")
    assert not containers.answers()


def test_without_the_program_there_is_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not containers.answers()


def started(port: str, process: int) -> dict[str, str | tuple[int, str]]:
    return {"run": ID, "port": port, "inspect": str(process), "logs": "its last words", "rm": ID}


def test_a_container_is_timed_until_it_serves_and_removed(engine: FakeDocker, tmp_path: Path) -> None:
    with server(LoopbackModel("m")) as served:
        engine.set_responses(started(f"{served.address}\n[::]:{served.port}", os.getpid()))
        with containers.serving("image", tmp_path) as container:
            assert (container.id, container.started_s > 0) == (ID, True)
            assert math.isnan(container.cpu_s)  # the process with that number belongs to no container
            assert "rm" not in [words[0] for words in engine.calls]
    run = engine.calls[0]
    assert run[-1] == "image"
    assert f"{tmp_path}:/models:ro" in run
    assert {"--read-only", "127.0.0.1::8001", "no-new-privileges:true"} <= set(run)
    assert engine.calls[-1] == ["rm", "--force", ID]


def test_a_container_that_has_ended_has_no_processor_time(engine: FakeDocker) -> None:
    """Its process number is 0, and all processes of the machine descend from process 0."""
    engine.set_responses({"inspect": "0"})
    assert math.isnan(containers._used(ID))


def test_a_container_that_does_not_serve_is_reported_with_its_log_and_removed(
    engine: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "_READY_TIMEOUT_S", 0.3)
    with server(LoopbackModel("m", state="loading")) as served:
        engine.set_responses(started(served.address, 0))
        with pytest.raises(RuntimeError, match="did not become ready:\nits last words"):
            containers.serving("image", tmp_path).__enter__()
    assert engine.calls[-1] == ["rm", "--force", ID]


def test_cached_files_are_dropped_if_the_layers_are_directories(engine: FakeDocker, tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper" / "file").write_text("x", "utf-8")
    (tmp_path / "upper" / "link").symlink_to(tmp_path / "upper" / "file")
    engine.set_responses({"inspect": f"{tmp_path}/upper:{tmp_path}/upper"})
    assert containers.forget("i", tmp_path / "upper")
    engine.set_responses({"inspect": f"{tmp_path}/upper:{tmp_path}/gone"})
    assert not containers.forget("i")
    engine.set_responses({"inspect": "<no value>:<no value>"})  # from an engine that stores layers in another way
    assert not containers.forget("i")


@pytest.mark.compose
def test_the_output_of_a_real_engine_is_understood(tmp_path: Path) -> None:
    if not containers.answers():
        pytest.skip("no Docker engine answers here")
    (tmp_path / "own").write_bytes(b"x" * 12_345)
    (tmp_path / "base").write_bytes(b"x" * 678)
    stages = "FROM scratch AS made\nCOPY own /layer/own\nFROM scratch\nCOPY base /base\nCOPY --from=made /layer /\n"
    (tmp_path / "Dockerfile").write_text(stages, "utf-8")
    image = f"bf16kit-test-{uuid.uuid4().hex[:8]}"
    containers.docker("build", "--quiet", "--tag", image, str(tmp_path))
    try:
        assert containers.layer_bytes(image) == [12_345]
        assert containers.image_bytes(image) == 12_345 + 678
        assert containers.forget(image, tmp_path) is (os.getuid() == 0)
    finally:
        containers.docker("rmi", "--force", image)


@pytest.mark.compose
def test_a_real_containers_processor_time_is_its_own() -> None:
    if not containers.answers():
        pytest.skip("no Docker engine answers here")
    base = "python:3.11-slim-bookworm"
    if subprocess.run(["docker", "image", "inspect", base], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"the image {base} is not on this machine")
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ntime.sleep(600)"
    started = containers.docker("run", "--detach", "--network", "none", base, "python3", "-c", code)
    try:
        until(lambda: "done" in containers.docker("logs", started), 60, "half a second of work")
        assert 0.4 <= containers._used(started) < 5  # counted in hundredths of a second, for each process
    finally:
        containers.docker("rm", "--force", started)
    with pytest.raises(RuntimeError, match=started):
        containers._used(started)
