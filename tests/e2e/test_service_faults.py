"""Faults of the service, all at once, each of one model of a server: which alerts fire for it, and that no other does.

A real Prometheus scrapes the server. ``make bench-drift`` uses the rules as shipped, and writes the results into
docs/drift.md; ``make test-long`` lets alerts fire as soon as their condition is true.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import faultymodels
import grpc
import numpy as np
import onnx
import prometheusprocess
import pytest
from artifacts import write_damaged, write_mlp
from drifttable import LONG, Row, listed, named, record
from loopback import infer_request
from prometheusprocess import Prometheus
from serverprocess import Serve, ServerProcess
from waiting import repeating, until
from workerprocesses import Client

import graphs
from bf16kit.artifact.reading import Digests
from bf16kit.numerics.tensors import Array

pytestmark = [pytest.mark.long, prometheusprocess.needed]
PATIENCE_S = 1200 if LONG else 120  # the longest `for:` of these alerts is ten minutes
SHADOW = "shadow: {rate: 1, max_per_second: 100000}\n"
MUCH = 1000.0
Send = Callable[[Client, np.random.Generator], object]


class Fault(NamedTuple):
    """A fault of ``model``, described by ``words``, and the alerts that must fire for it and that may."""

    model: str
    words: str
    seen_by: str
    alerts: set[str]
    action: str
    send: Send
    others: frozenset[str] = frozenset()
    serving: str = SHADOW


def volley(client: Client, random: np.random.Generator) -> None:
    """Send twenty requests at once to a queue with room for one."""
    message = infer_request("rejecting", x=random.standard_normal((1, 16)).astype(np.float32))
    calls = [client.ask("ModelInfer").future(message, timeout=60) for _ in range(20)]
    for call in calls:
        call.code()  # returns once the call has ended


def too_much(client: Client, random: np.random.Generator) -> None:
    with pytest.raises(grpc.RpcError, match="INTERNAL"):
        client.infer("failing", 60, x=np.full((1, 16), MUCH, np.float32))


def waves(model: str, change: Callable[[Array], Array]) -> Send:
    """Return a function that sends one row, changed, to a model of :mod:`faultymodels`."""
    return lambda client, random: client.infer(model, 60, x=change(faultymodels.rows(1, int(random.integers(1 << 30)))))


def mlp(model: str) -> Send:
    return lambda client, random: client.infer(model, 60, x=random.standard_normal((1, 16)).astype(np.float32))


FAULTS = (
    Fault(
        "rejecting", "most requests rejected", "`rejected_total`", {"Bf16RequestsRejected"},
        "the others are answered", volley, serving="max_queue_size: 1\nmax_queue_delay_ms: 10\n",
    ),
    Fault(
        "failing", "INTERNAL to every request", "`requests_total`", {"Bf16FailureBudgetBurning"},
        "an incident in the log for each", too_much,
    ),
    Fault(
        "rollout", "a new version fails its golden gate", "`golden_gate_passed` 0",
        {"Bf16VersionNotReady", "Bf16GoldenGateFailed"}, "the older version answers", mlp("rollout"),
    ),
    Fault(
        "scaled", "inputs times 255", "`out_of_range_total`", {"Bf16InputOutOfRange"}, "bf16 answers",
        waves("scaled", lambda x: x * np.float32(255)),
    ),
    Fault(
        "infinite", "inputs that are not finite", "`out_of_range_total`",
        {"Bf16InputOutOfRange", "Bf16ReferenceNotFinite"}, "bf16 answers",
        waves("infinite", lambda x: x * np.float32(np.inf)),
    ),
    Fault(
        "tail", "5 % of rows at 10 × the budget", "`relative_l2.p99`", {"Bf16DriftOverBudget"},
        "bf16 answers (`fallback: alert`)", waves("tail", lambda x: x),
        frozenset({"Bf16DriftChanged", "Bf16ModelBroken"}),
    ),
)  # fmt: skip
SOUND = Fault("sound", "none, beside all of these", "", set(), "bf16 answers", mlp("sound"))


def runs_out_of_memory(target: Path) -> None:
    """Write an MLP that wants a tensor of 40 TB for inputs whose first value is :data:`MUCH` or more."""
    manifest = write_mlp(target).manifest
    model = onnx.load(target / "cpu.onnx", load_external_data=False)
    added = graphs.parsed(
        """(float[batch,16] x, float[batch,16] y_before) => (float[batch,16] y) {
        x_first = GatherND(x, corner)
        is_much = GreaterOrEqual(x_first, much)
        one_if_much = Cast<to = 7>(is_much)
        size = Mul(one_if_much, elements)
        zeros = ConstantOfShape(size)
        zero = ReduceSum<keepdims = 0>(zeros)
        y = Add(y_before, zero) }""",
        much=np.array([MUCH], np.float32),
        corner=np.array([[0, 0]]),
        elements=np.array([10**13]),
    ).graph
    model.graph.node[-1].output[0] = "y_before"
    model.graph.node.extend(added.node)
    model.graph.initializer.extend(added.initializer)
    (target / "cpu.onnx").write_bytes(model.SerializeToString())
    files = manifest.files | {"cpu.onnx": Digests().entry(target / "cpu.onnx")}
    (target / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).dumps())


def fails_its_golden_gate(target: Path) -> None:
    """Write a version whose digests are right, and whose outputs are 1.05 times those of its golden samples."""
    golden = write_mlp(target.with_name("sound")).manifest.golden
    damaged = write_damaged(target).manifest.model_copy(update={"golden": golden})
    (target / "manifest.json").write_bytes(damaged.dumps())


@pytest.fixture
def server(tmp_path: Path, serve: Serve) -> ServerProcess:
    repository = tmp_path / "repository"
    sound = faultymodels.convert(repository, "scaled", tmp_path / "source")
    faultymodels.copied(sound, repository, "infinite")
    runs_out_of_memory(repository / "failing" / "1")
    faultymodels.damaged(sound, repository, "tail", faultymodels.far_off_in_the_tail)
    for name in ("rejecting", "rollout", "sound"):
        write_mlp(repository / name / "1")
    for fault in (*FAULTS, SOUND):
        (repository / fault.model / "serving.yaml").write_text(fault.serving, "utf-8")
    polling = {"BF16KIT_POLL_SECONDS": "1", "BF16KIT_MODEL_CONTROL": "poll"}
    return serve("--repository", repository, env=polling).wait_ready()


@contextlib.contextmanager
def traffic(server: ServerProcess) -> Iterator[None]:
    """Send five times a second to each model."""
    with contextlib.ExitStack() as stack:

        def sender(fault: Fault, seed: int) -> Callable[[], object]:
            random, client = np.random.default_rng(seed), stack.enter_context(Client(server.target))
            return lambda: fault.send(client, random)

        with repeating(*(sender(each, at) for at, each in enumerate((*FAULTS, SOUND))), pause=0.2):
            yield


def test_each_fault_of_the_service_fires_its_alerts_and_no_other(server: ServerProcess, tmp_path: Path) -> None:
    expected = {(alert, fault.model) for fault in FAULTS for alert in fault.alerts}
    allowed = {(alert, fault.model) for fault in FAULTS for alert in fault.others}
    with Prometheus(server.ports()[1], tmp_path / "prometheus", at_once=not LONG) as prometheus:
        since = time.time()
        fails_its_golden_gate(tmp_path / "2")
        (tmp_path / "2").rename(tmp_path / "repository" / "rollout" / "2")
        with traffic(server):
            until(lambda: expected <= prometheus.fired(since).keys(), PATIENCE_S, "every alert")
        fired = prometheus.fired(since)
    # Before the first scrape, or if one is late or scrapes a reference that is loading, or one of two counters before
    # the other, or if a loaded machine is slow for a moment. In production, alerts wait.
    early = {("Bf16NothingScraped", ""), ("Bf16ServerDown", ""), ("Bf16ShadowFailing", "infinite")}
    early |= {
        (alert, fault.model)
        for alert in ("Bf16ReferenceDown", "Bf16LatencyBudgetBurning", "Bf16ShadowStarved")
        for fault in (*FAULTS, SOUND)
    }
    early = set() if LONG else early
    assert fired.keys() - early - allowed == expected
    for fault in (*FAULTS, SOUND):
        alerts = {alert: seconds for (alert, model), seconds in fired.items() if model == fault.model}
        record(Row(fault.words, fault.seen_by, "", named(alerts) or "none", fault.action))


def test_the_page_has_every_fault() -> None:
    """docs/drift.md, as ``make bench-drift`` writes it, lists each fault of this file."""
    page = (Path(__file__).parents[2] / "docs" / "drift.md").read_text("utf-8")
    assert {fault.words for fault in (*FAULTS, SOUND)} <= set(listed(page))
