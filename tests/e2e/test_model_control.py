"""Models of a server process change while clients send requests without pause."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from artifacts import write_product
from asking import RequestLoop
from serverprocess import Serve, ServerProcess
from waiting import until

from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import load

pytestmark = pytest.mark.long  # the server scans the repository every second, and a changed one again a second later
FEEDS = {"x": np.linspace(-1, 1, 256, dtype=np.float32).reshape(4, 64)}
CLIENTS = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return two artifacts of one model, which give different outputs."""
    root = tmp_path_factory.mktemp("made")
    for seed, name in enumerate(("old", "new")):
        write_product(root / name / "m" / "1", seed=seed)
    return {name: root / name / "m" / "1" for name in ("old", "new")}


@pytest.fixture(scope="module")
def right(made: Mapping[str, Path]) -> Mapping[str, bytes]:
    answers = {
        name: load(Artifact.open(path), "cpu", threads=1).run(FEEDS)["y"].tobytes() for name, path in made.items()
    }
    assert answers["old"] != answers["new"]
    return answers


def all_ok(asking: list[RequestLoop]) -> bool:
    return {code for each in asking for code in each.codes} == {"OK"}


@contextlib.contextmanager
def clients(server: ServerProcess, right: Mapping[str, bytes]) -> Iterator[list[RequestLoop]]:
    with contextlib.ExitStack() as stack:
        asking = [stack.enter_context(RequestLoop(server.target, "m", FEEDS, right)) for _ in range(CLIENTS)]
        for each in asking:
            each.wait_for(5)
        yield asking
        for each in asking:
            each.wait_for(5)
    assert [each.wrong for each in asking] == [[]] * CLIENTS


def index(client: Any) -> dict[str, str]:
    """Return the state of each version of the one model."""
    return {line.version: line.state for line in client.get_model_repository_index().models}


def copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=shutil.copyfile)


def test_a_slowly_copied_version_is_served_once_complete_and_the_old_one_until_then(
    tmp_path: Path, serve: Serve, made: Mapping[str, Path], right: Mapping[str, bytes]
) -> None:
    copy(made["old"], tmp_path / "m" / "1")
    options = ("--repository", tmp_path, "--model-control", "poll", "--workers", "2")
    server = serve(*options, env={"BF16KIT_POLL_SECONDS": "1"}).wait_ready()
    with clients(server, right) as asking, triton.InferenceServerClient(server.target) as client:
        target = tmp_path / "m" / "2"
        target.mkdir()
        shutil.copyfile(made["new"] / "manifest.json", target / "manifest.json")
        until(lambda: index(client) == {"1": "READY", "2": "UNAVAILABLE"}, 60)  # the server tried to load it
        assert server.get("/readyz")[0] == 200
        for file in made["new"].iterdir():
            if file.name != "weights.bf16":
                shutil.copyfile(file, target / file.name)
        with (target / "weights.bf16").open("wb") as weights:
            weights.write((made["new"] / "weights.bf16").read_bytes()[:-1])
            weights.flush()
            until(lambda: server.log.count("model 'm' version 2 is unavailable") >= 2, 60)  # the server tried again
            assert index(client) == {"1": "READY", "2": "UNAVAILABLE"}
            assert server.get("/readyz")[0] == 200
            assert sum(each.answered["new"] for each in asking) == 0
            weights.write((made["new"] / "weights.bf16").read_bytes()[-1:])
        until(lambda: index(client) == {"1": "UNAVAILABLE", "2": "READY"}, 60)
        until(lambda: all(each.answered["new"] for each in asking))
    assert all_ok(asking)
    assert server.log.count("model 'm' version 2 is unavailable") <= 3, "one line for each pause of the copy"
    assert "Traceback" not in server.log


def test_every_request_succeeds_while_a_client_reloads_the_model_repeatedly(
    tmp_path: Path, serve: Serve, made: Mapping[str, Path], right: Mapping[str, bytes]
) -> None:
    copy(made["old"], tmp_path / "m" / "1")
    explicit = ("--model-control", "explicit", "--load-model", "m", "--workers", "2")
    server = serve("--repository", tmp_path, *explicit).wait_ready()
    with clients(server, right) as asking, triton.InferenceServerClient(server.target) as client:
        for turn in range(8):
            copy(made["new" if turn % 2 == 0 else "old"], tmp_path / "m" / ".1")
            (tmp_path / "m" / "1").rename(tmp_path / "m" / ".old")
            (tmp_path / "m" / ".1").rename(tmp_path / "m" / "1")
            shutil.rmtree(tmp_path / "m" / ".old")
            client.load_model("m")
            assert index(client) == {"1": "READY"}
            for each in asking:
                each.wait_for(2)
    assert all_ok(asking)
    assert all(each.answered["old"] and each.answered["new"] for each in asking)
