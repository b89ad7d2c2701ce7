"""Artifacts are changed on purpose and their digests corrected: a running server serves each, or logs why it does not.

The artifacts come in groups, as models of their own, while a client sends requests to another model without pause.
"""

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import figures
import numpy as np
import pytest
import scanning
from artifacts import write_endless, write_lookup, write_mlp, write_product
from asking import RequestLoop, code_of
from attacked import Target
from serverprocess import ServerProcess
from tampering import tampered
from waiting import until

from bf16kit.artifact.artifact import Artifact
from bf16kit.numerics.tensors import BY_NAME, Array
from bf16kit.runtime.loading import load

pytestmark = pytest.mark.hostile
GROUP = 20
FEEDS = {"x": np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)}
SERVING = "shadow: {rate: 1, max_per_second: 1000}\n"
VERDICT = re.compile(r"model '(t\d+)' version 1 is (ready|unavailable)\b(.*)")
# A rejection names a file of the artifact, or the faulty part of it.
NAMED = re.compile(r"manifest\.json|\w+\.onnx|golden|weights\.\w+|residual\.bin|has no profile for cpu")
WRITERS: tuple[Callable[[Path], Artifact], ...] = (write_product, write_mlp, write_lookup)
LONGEST = 1_300  # characters of a line


class Server:
    """A server that scans its repository, which always has the model ``good``."""

    def __init__(self, target: Target, root: Path) -> None:
        self.target = target
        self.repository = root / "repository"
        artifact = write_mlp(self.repository / "good" / "1")
        self.right = {"good": load(artifact, "cpu", threads=1).run(FEEDS)["y"].tobytes()}

        self._verdicts: dict[str, list[tuple[str, str]]] = {}
        self._read = 0  # lines

    def verdicts(self) -> dict[str, list[tuple[str, str]]]:
        """Return what the log states of each model: whether it is ready, and the rest of the line."""
        new = self.target.process.lines[self._read :]
        self._read += len(new)
        for said in filter(None, map(VERDICT.search, new)):
            self._verdicts.setdefault(said[1], []).append((said[2], said[3]))
        return self._verdicts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("tampered")
    (root / "repository").mkdir()
    with ServerProcess("--repository", root / "repository", program=Path(scanning.__file__)) as process:
        server = Server(Target(process), root)
        process.wait_ready()
        warm(server, root)
        yield server


def warm(server: Server, root: Path) -> None:
    """Load and unload each kind of artifact, so that memory that is allocated once does not count as growth."""
    for write in WRITERS:
        write(root / "warm" / write.__name__ / "1")
        (root / "warm" / write.__name__ / "serving.yaml").write_text(SERVING)
        (root / "warm" / write.__name__).rename(server.repository / write.__name__)
    until(lambda: server.target.process.log.count("is ready after") == 4, what="four models")
    for _ in range(50):
        assert code_of(server.target.address, "good", FEEDS) == "OK"
    names = {write.__name__ for write in WRITERS}
    for name in names:
        (server.repository / name).rename(root / "warm" / name)
    until(lambda: unloaded(server.target, names), what="the end of them")


def test_tampered_artifacts_are_served_or_rejected_with_one_clear_line(server: Server, tmp_path: Path) -> None:
    count = figures.amount(40, 1_000)
    sources = [write(tmp_path / write.__name__ / "1").path for write in WRITERS]
    changes: dict[str, str] = {}
    said: dict[str, list[tuple[str, str]]] = {}
    codes: Counter[str] = Counter()
    target = server.target
    with target.stays_healthy(), RequestLoop(target.address, "good", FEEDS, server.right) as asking:
        for first in range(0, count, GROUP):
            group = {f"t{number:04}" for number in range(first, min(count, first + GROUP))}
            changes |= {name: publish(server, tmp_path, name, random.Random(name), sources) for name in sorted(group)}
            until(lambda group=group: server.verdicts().keys() >= group, 60, "a verdict on each")  # type: ignore[misc]
            said |= {name: list(server.verdicts()[name]) for name in group}
            codes.update(ask(server, name) for name in group if said[name][0][0] == "ready")
            for name in group:
                (server.repository / name).rename(tmp_path / "tampered" / name)
                shutil.rmtree(tmp_path / "tampered" / name)
            until(lambda group=group: unloaded(target, group), 60, "the group's end")  # type: ignore[misc]
    figures.record(
        how_much=f"{count:,} artifacts", refused=count - codes.total(), served=codes.total(), answers=dict(codes),
        requests_to_another=dict(asking.codes), wrong_answers=len(asking.wrong),
    )  # fmt: skip
    assert [(changes[name], lines) for name, lines in said.items() if not is_clear(lines)] == []
    assert "Traceback" not in target.process.log, target.process.log.partition("Traceback")[2][:3000]
    assert max(map(len, target.process.lines)) < LONGEST
    assert codes.total() < count / 2
    assert codes.keys() <= {"OK", "INVALID_ARGUMENT"}
    assert (asking.wrong, set(asking.codes)) == ([], {"OK"})


def test_a_graph_that_never_ends_is_abandoned_and_the_next_model_is_loaded(server: Server, tmp_path: Path) -> None:
    for name, write in (("t9001", write_endless), ("t9002", write_mlp)):
        write(tmp_path / name / "1")
    with server.target.stays_healthy(), RequestLoop(server.target.address, "good", FEEDS, server.right) as asking:
        (tmp_path / "t9001").rename(server.repository / "t9001")
        until(lambda: server.target.process.metric('bf16kit_model_ready{model="t9001",version="1"}') == 0, what="t9001")
        (tmp_path / "t9002").rename(server.repository / "t9002")
        until(lambda: server.verdicts().keys() >= {"t9001", "t9002"}, 60, "a verdict on both")
    endless, good = server.verdicts()["t9001"][0], server.verdicts()["t9002"][0]
    assert endless[0] == "unavailable"
    assert "cpu.onnx, run for the first time: ONNX Runtime was not done after 5 s" in endless[1]
    assert good[0] == "ready"
    assert (asking.wrong, set(asking.codes)) == ([], {"OK"})


def publish(server: Server, root: Path, name: str, choice: random.Random, sources: list[Path]) -> str:
    model = root / "tampered" / name
    model.mkdir(parents=True)
    (model / "serving.yaml").write_text(SERVING)
    said = tampered(choice.choice(sources), model / "1", choice)
    model.rename(server.repository / name)
    return said


def is_clear(said: list[tuple[str, str]]) -> bool:
    """Return whether there is one verdict that is not a rejection, or one that names the fault and is no internal
    error.
    """
    (kind, text), *more = said
    return not more and (kind == "ready" or (NAMED.search(text) is not None and "unexpected error" not in text))


def ask(server: Server, name: str) -> str:
    """Return the status code of a request that fits the manifest."""
    fields = json.loads((server.repository / name / "1" / "manifest.json").read_text())
    return code_of(server.target.address, name, {spec["name"]: zeros(spec) for spec in fields["inputs"]})


def zeros(spec: dict[str, Any]) -> Array:
    return np.zeros([dim if isinstance(dim, int) else 1 for dim in spec["shape"]], BY_NAME[spec["dtype"]].numpy)


def unloaded(target: Target, group: set[str]) -> bool:
    page = target.process.get("/metrics")[1]
    return not any(f'model="{name}"' in page for name in group)
