"""Checks of ModelStatistics: counts grow by exactly what was sent, and add up."""

from __future__ import annotations

import time

from oip_conformance.checks.metadata import UNKNOWN_NAME
from oip_conformance.checks.sources import extension
from oip_conformance.models import Model
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, Code, InvalidCall, check, must, refusal

_NEEDS = "statistics"
_SOURCE = extension(_NEEDS)


def _statistics(session: Session, model: Model, version: str = "") -> pb.ModelStatistics:
    """Return the statistics of one version; without a version, the sums of the fields that the checks need."""
    request = pb.ModelStatisticsRequest(name=model.name, version=version)
    response = session.target.call(request)
    must(response.ok and response.message.model_stats, "statistics", response, request)
    total = pb.ModelStatistics(name=model.name)
    for statistics in response.message.model_stats:
        must(statistics.name == model.name, f"statistics of {model.name!r} alone", statistics.name, request)
        total.inference_count += statistics.inference_count
        total.execution_count += statistics.execution_count
        total.inference_stats.success.count += statistics.inference_stats.success.count
        total.inference_stats.success.ns += statistics.inference_stats.success.ns
        total.inference_stats.compute_infer.count += statistics.inference_stats.compute_infer.count
        total.last_inference = max(total.last_inference, statistics.last_inference)
        total.batch_stats.extend(statistics.batch_stats)
    return total


def _wait_for_successes(session: Session, model: Model, success: int) -> pb.ModelStatistics:
    """Return the statistics once they count ``success`` requests; they may lag behind the responses."""
    deadline = time.monotonic() + session.options.patience
    while True:
        statistics = _statistics(session, model)
        if statistics.inference_stats.success.count >= success or time.monotonic() > deadline:
            return statistics
        time.sleep(0.02)


def _send_requests(
    session: Session, model: Model, requests: int, rows: int
) -> tuple[pb.ModelStatistics, pb.ModelStatistics]:
    before = _statistics(session, model)
    for _ in range(requests):
        session.infer(session.request(model, rows=rows))
    return before, _wait_for_successes(session, model, before.inference_stats.success.count + requests)


@check(
    "statistics.success",
    MUST,
    _SOURCE,
    "inference_stats.success: the count of all successful inference requests, and their cumulative duration.",
    _NEEDS,
)
def success(session: Session) -> None:
    before, after = _send_requests(session, session.model, 3, 1)
    grown = after.inference_stats.success.count - before.inference_stats.success.count
    must(grown == 3, "success.count 3 more after 3 requests", f"{grown} more")
    must(after.inference_stats.success.ns > before.inference_stats.success.ns, "success.ns to grow", "no more")


@check(
    "statistics.rows",
    MUST,
    _SOURCE,
    "inference_count: each inference in a batched request is counted as an individual inference.",
    _NEEDS,
)
def rows(session: Session) -> None:
    model = session.batching()
    before, after = _send_requests(session, model, 3, 2)
    grown = after.inference_count - before.inference_count
    must(grown == 6, "inference_count 6 more after 3 requests of 2 rows", f"{grown} more")
    runs = after.execution_count - before.execution_count
    must(1 <= runs <= 3, "execution_count 1 to 3 more after 3 requests", f"{runs} more")


@check("statistics.refused", MUST, _SOURCE, "inference_count and success count successful requests only.", _NEEDS)
def refused(session: Session) -> None:
    before = _statistics(session, session.model)
    request = session.request()
    request.raw_input_contents[0] += b"\0"
    response = session.target.call(request)
    must(not response.ok, "a rejection", response, request)
    session.infer(session.request())
    after = _wait_for_successes(session, session.model, before.inference_stats.success.count + 1)
    grown = after.inference_stats.success.count - before.inference_stats.success.count
    must(grown == 1, "success.count 1 more after one request answered and one rejected", f"{grown} more")


@check(
    "statistics.last-inference",
    MUST,
    _SOURCE,
    "last_inference: the time of the last inference request, as milliseconds since the epoch.",
    _NEEDS,
)
def last_inference(session: Session) -> None:
    before, after = _send_requests(session, session.model, 1, 1)
    must(after.last_inference >= before.last_inference, "last_inference not to go back", after.last_inference)
    ago = abs(time.time() * 1000 - after.last_inference)
    must(ago < 86_400_000, "milliseconds since the epoch, about now", after.last_inference)


@check(
    "statistics.batches",
    MUST,
    _SOURCE,
    "batch_stats indicate how many actual model executions were performed: they add up to execution_count.",
    _NEEDS,
)
def batches(session: Session) -> None:
    _, after = _send_requests(session, session.model, 1, 1)
    runs = sum(batch.compute_infer.count for batch in after.batch_stats)
    must(runs == after.execution_count, f"batches that add up to {after.execution_count} executions", runs)


@check(
    "statistics.versions",
    MUST,
    _SOURCE,
    "No version: statistics for all model versions; a version: of that one.",
    _NEEDS,
)
def versions(session: Session) -> None:
    for model in session.models:
        known = {*model.metadata.versions}
        response = session.target.call(pb.ModelStatisticsRequest(name=model.name))
        listed = {statistics.version for statistics in response.message.model_stats} if response.ok else set()
        must(response.ok and known <= listed, f"versions {sorted(known)} of {model.name!r}", response)
        for version in known:
            request = pb.ModelStatisticsRequest(name=model.name, version=version)
            one = session.target.call(request)
            must(
                one.ok and [s.version for s in one.message.model_stats] == [version],
                f"version {version} alone",
                one,
                request,
            )


@check("statistics.all-models", MUST, _SOURCE, "No name: statistics for all models.", _NEEDS)
def all_models(session: Session) -> None:
    response = session.target.call(pb.ModelStatisticsRequest())
    listed = {statistics.name for statistics in response.message.model_stats} if response.ok else set()
    wanted = {model.name for model in session.models}
    must(response.ok and wanted <= listed, f"{sorted(wanted)} among them", response)


UNKNOWN = refusal(
    "statistics.unknown-model", MUST, _SOURCE, "Statistics of an unknown model are an error.",
    [Code.INVALID_ARGUMENT, Code.NOT_FOUND],  # Triton returns the first; for every other RPC it returns the second
    lambda session: InvalidCall(pb.ModelStatisticsRequest(name=UNKNOWN_NAME), [UNKNOWN_NAME]), _NEEDS,
)  # fmt: skip
