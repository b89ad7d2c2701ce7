"""The parts of deploy/ray that need no Ray: frames, metadata, the front's view of reports, checks of options."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from artifacts import write_mlp
from grpc import StatusCode
from waiting import until

from bf16kit.messages.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from deploy.ray import reports as reports_module
from deploy.ray.calls import APPLICATION, RPCS, SECONDS_LEFT, add_routing, strip_routing
from deploy.ray.frames import Frame, parse_frame
from deploy.ray.ingress import Ingress
from deploy.ray.registry import FrontModels, FrontRegistry
from deploy.ray.reports import Report, Reports
from deploy.ray.settings import Scaling, check
from service.config.serverconfig import ServerConfig
from service.contract import StatisticsSnapshot
from service.grpc.handlers import SERVICE
from service.grpc.status import Status
from service.workers.state import SlotState

INFER = f"/{SERVICE}/ModelInfer"


class TestFrames:
    @pytest.mark.parametrize("answer", [b"", b"\x00\x01", Status(StatusCode.NOT_FOUND, "no model ‘m’"), b"\x01" * 9])
    def test_a_frame_returns_the_response_or_status_put_into_it(self, answer: bytes | Status) -> None:
        assert parse_frame(Frame.of(answer).SerializeToString()) == answer

    @pytest.mark.parametrize("data", [b"", b"\x02", b"\x01", b"\x01\xff"])
    def test_bytes_that_are_not_a_frame_are_rejected(self, data: bytes) -> None:
        with pytest.raises(ValueError, match="is not the start of a frame"):
            parse_frame(data)


class TestMetadata:
    def test_a_replica_gets_the_clients_metadata_and_the_deadline(self) -> None:
        sent = add_routing([("traceparent", "00-1"), ("application", "mine"), (SECONDS_LEFT, "9")], "bf16kit.m", 1.5)
        assert (APPLICATION, "bf16kit.m") in sent
        assert [name for name, _ in sent].count(APPLICATION) == 1
        assert strip_routing(sent) == ((("traceparent", "00-1"),), 1.5)

    def test_a_call_without_a_deadline_has_none(self) -> None:
        assert strip_routing(add_routing([], "bf16kit.m", None)) == ((), None)


def report(replica: str, *slots: SlotState, count: int = 0) -> Report:
    counted = {slot.key: StatisticsSnapshot(inference_count=count) for slot in slots}
    return Report(replica, f"{replica}:1", slots, counted)


class Reporters:
    """Replicas that report as ``deploy.ray.replica.Replica`` does, on one event loop. Each has ``count`` requests."""

    def __init__(self, replicas: int) -> None:
        self.count = 1
        self.sent = 0
        self.stuck: set[str] = set()
        self.meet: asyncio.Barrier | None = None  # where those that were asked wait before they report
        self.callers = 0  # that have asked for statistics
        self._may_report = asyncio.Event()
        self._may_report.set()
        self._reports = Reports()
        self._reports.set_models({"m": [1]})
        self._ended = asyncio.Event()
        self._names = [str(number) for number in range(replicas)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    def statistics(self) -> int:
        self.callers += 1
        return self._reports.totals([("m", 1)])["m", 1].inference_count

    def hold(self) -> None:
        """Let no replica report before :meth:`release`."""
        self._may_report.clear()

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._may_report.set)

    async def _run(self) -> None:
        tasks = [asyncio.ensure_future(self._report(name)) for name in self._names]
        await self._ended.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _report(self, name: str) -> None:
        while name not in self.stuck:
            await self._may_report.wait()
            self.sent += 1
            await self._reports.receive(report(name, SlotState("m", 1, "ready"), count=self.count))
            if self.meet is not None:
                await self.meet.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: len(self._reports.reports()) == len(self._names), 10, "all first reports")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)
        self._loop.close()


class TestReports:
    def test_a_model_is_ready_when_one_of_its_replicas_is(self) -> None:
        reports = Reports()
        registry, ready = FrontRegistry(reports), list[bool]()

        def look() -> None:
            ready.append(registry.ready)

        look()
        reports.set_models({"m": [1]})
        look()
        reports.store(report("a", SlotState("m", 1, "loading")))
        look()
        reports.store(report("b", SlotState("m", 1, "ready")))
        look()
        assert registry.versions("m") == [1]
        reports.forget("b")
        look()
        assert ready == [False, False, False, True, False]

    def test_a_replica_that_stops_reporting_is_forgotten(self) -> None:
        now = [0.0]
        reports = Reports(lambda: now[0])
        reports.set_models({"m": [1]})
        reports.store(report("a", SlotState("m", 1, "ready")))
        now[0] = 6.0
        reports.maintain()
        assert FrontRegistry(reports).ready
        now[0] = 7.0
        reports.maintain()
        assert not FrontRegistry(reports).ready

    @pytest.mark.parametrize("only_at_the_end", [False, True])
    def test_the_reason_for_a_failed_start_is_kept_after_the_replica_is_gone(self, only_at_the_end: bool) -> None:
        """Ray starts the replica three times and then reports nothing; clients get the message of a plain server."""
        reports = Reports()
        reports.set_models({"m": [1]})
        failed = report("a", SlotState("m", 1, "unavailable", "a digest is wrong"))
        reports.store(report("a", SlotState("m", 1, "loading")) if only_at_the_end else failed)
        reports.forget("a", failed if only_at_the_end else None)
        assert FrontRegistry(reports).find("m", "").reason == "a digest is wrong"
        for ask in (FrontRegistry(reports).acquire, FrontRegistry(reports).get):
            with pytest.raises(NotFound, match="no version of model 'm' is ready; its replicas' log says why"):
                ask("m", "")
        reports.store(report("b", SlotState("m", 1, "ready")))
        reports.forget("b")
        assert FrontRegistry(reports).find("m", "").state == "loading"

    def test_retired_models_are_not_ready_but_still_serve(self) -> None:
        reports, told = Reports(), list[bool]()
        reports.set_models({"m": [1]})
        reports.store(report("a", SlotState("m", 1, "ready")))
        registry = FrontRegistry(reports)
        registry.subscribe(lambda: told.append(registry.ready))
        assert registry.ready
        reports.retire()
        assert told == [False]
        assert registry.versions("m") == [1], "who still comes is answered"

    def test_a_model_that_is_no_longer_wanted_is_unknown(self) -> None:
        reports = Reports()
        reports.store(report("a", SlotState("m", 1, "ready")))
        with pytest.raises(NotFound, match="unknown model 'm'"):
            FrontRegistry(reports).acquire("m", "")

    @pytest.mark.parametrize(("version", "error"), [("", Unavailable), ("2", NotFound), ("one", InvalidRequest)])
    def test_the_error_of_a_request_for_a_model_without_a_replica(self, version: str, error: type[Exception]) -> None:
        reports = Reports()
        reports.set_models({"m": [1]})
        with pytest.raises(error):
            FrontRegistry(reports).acquire("m", version)

    def test_a_ready_replica_with_a_failed_golden_gate_is_the_one_shown(self) -> None:
        reports = Reports()
        reports.set_models({"m": [1]})
        for name, golden in (("a", "fine"), ("b", "FAILED: over budget"), ("c", "fine")):
            described: Any = SimpleNamespace(golden=golden)
            reports.store(report(name, SlotState("m", 1, "ready", "", described)))
        found = reports.slots()["m", 1].model
        assert found is not None
        assert found.golden.startswith("FAILED")

    @pytest.mark.long
    def test_statistics_sum_all_replicas_and_keep_the_counts_of_removed_ones(self) -> None:
        now = iter(range(1000))
        reports = Reports(lambda: float(next(now)))
        reports.set_models({"m": [1]})
        for name, count in (("a", 3), ("b", 4)):
            reports.store(report(name, SlotState("m", 1, "ready"), count=count))
        reports.forget("a")
        assert reports.totals([("m", 1)])["m", 1].inference_count == 7

    @pytest.mark.parametrize("replicas", [1, 100, 1000])
    def test_statistics_count_every_request_that_ended_before_because_all_replicas_are_asked_at_once(
        self, replicas: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """None reports by itself, or before all are asked: a server that asks one after another waits in vain."""
        monkeypatch.setattr(Reports, "interval", 3600.0)
        monkeypatch.setattr(reports_module, "_STATISTICS_SECONDS", 30.0)
        with Reporters(replicas) as reporters:
            reporters.meet = asyncio.Barrier(replicas)
            for _ in range(2):
                reporters.count += 1
                assert reporters.statistics() == replicas * reporters.count

    def test_callers_that_ask_at_once_share_a_round_of_reports(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One round is under way when the others ask. They need a newer one, and the same one does for all."""
        monkeypatch.setattr(reports_module, "_STATISTICS_SECONDS", 30.0)
        with Reporters(50) as reporters, ThreadPoolExecutor(20) as threads:
            assert reporters.statistics() == 50
            reporters.hold()
            reporters.count, before = 2, reporters.sent
            found = [threads.submit(reporters.statistics) for _ in range(20)]
            until(lambda: reporters.callers == 21, 30, "all callers")
            reporters.release()
            assert {each.result(30) for each in found} == {100}
            assert reporters.sent - before < 20 * 50 / 2

    def test_statistics_name_how_many_replicas_are_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        with Reporters(10) as reporters:
            reporters.stuck = {"3", "7"}
            reporters.statistics()  # releases these two, which then end
            reporters.count = 5
            assert reporters.statistics() == 8 * 5 + 2
        assert "leaves out what 2 of 10 replicas counted since their last reports" in caplog.text

    def test_each_replica_reports_less_often_if_there_are_more_replicas(self) -> None:
        reports = Reports()
        reports.store(report("0", SlotState("m", 1, "ready")))
        assert reports.interval == 1.0
        for number in range(1, 1000):
            reports.store(report(str(number), SlotState("m", 1, "ready")))
        assert reports.interval == 10.0

    def test_the_reply_to_a_report_is_due_after_an_interval(self) -> None:
        started = time.perf_counter()
        assert asyncio.run(Reports().receive(report("a", SlotState("m", 1, "ready")))) == 1.0
        assert time.perf_counter() - started > 0.9

    def test_statistics_of_an_unknown_model_are_not_found(self) -> None:
        reports = Reports()
        with pytest.raises(NotFound):
            FrontModels(FrontRegistry(reports), reports).statistics("m", "")


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"workers": 2}, "workers is 2, which is not supported with Ray: Ray scales by replicas"),
            ({"shared_memory": True}, "another machine"),
            ({"model_control": "explicit"}, "one replica of many"),
            ({"max_connections": 9}, "max_connections is 9, which is not supported with Ray: connections are those of"),
            ({"grpc_port": 0}, "grpc_port is 0 and http_port 8002; give two that differ, and not 0"),
            ({"grpc_port": 8002}, "grpc_port is 8002 and http_port 8002"),
        ],
    )
    def test_server_settings_that_ray_does_not_support_are_rejected(
        self, tmp_path: Path, settings: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(ConfigError, match=said):
            check(ServerConfig(repository=tmp_path, **settings))

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"min_replicas": 0}, "give 1 ≤ min ≤ max"),
            ({"min_replicas": 3}, "min_replicas is 3 and max_replicas 1"),
            ({"cpus": 0}, "cpus is 0; give a number above 0"),
            ({"cpus": -1.0}, "cpus is -1.0"),
            ({"target": float("nan")}, "target is nan"),
            ({"gpus": float("nan")}, "gpus is nan; give 0 or more"),
            ({"gpus": -1}, "gpus is -1"),
            ({"gpus": float("inf")}, "gpus is inf"),
            ({"queued": 0}, "queued is 0; give 1 or more"),
            ({"per_node": -1}, "per_node is -1"),
            ({"cpus": "two"}, "scaling: "),
            ({"cpu": 2}, "unknown key 'cpu'"),
        ],
    )
    def test_invalid_scaling_values_are_rejected(self, wrong: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            Scaling.from_json(wrong)


class Context:
    """The context of a call, as grpc.aio gives it to Ray's proxy."""

    def __init__(self, left: float | None = None) -> None:
        self.left = left
        self.told: tuple[Any, str] = (None, "")

    def time_remaining(self) -> float | None:
        return self.left

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def set_code(self, code: Any) -> None:
        self.told = code, self.told[1]

    def set_details(self, words: str) -> None:
        self.told = self.told[0], words


class TestIngress:
    """The status and message that clients get for each result of Ray's handlers, which the tests replace."""

    def _ask(self, rays: Any, data: bytes = b"\x0a\x01m", **context: Any) -> tuple[bytes, Context, list[Any]]:
        ingress, asked, given = Ingress(), [], Context(**context)

        async def handler(request: bytes, seen: Any) -> bytes:
            asked.append(dict(seen.invocation_metadata()))
            return await rays(seen)  # type: ignore[no-any-return]

        ingress._method_handlers[INFER] = ingress._method_handlers[INFER]._replace(unary_unary=handler)
        found = ingress.service(type("Details", (), {"method": INFER}))
        return asyncio.run(found.unary_unary(data, given)), given, asked

    def test_a_response_is_passed_on_unchanged(self) -> None:
        async def rays(seen: Any) -> bytes:
            seen.set_trailing_metadata((("request_id", "x"),))
            return Frame.of(b"answer").SerializeToString()

        answer, context, asked = self._ask(rays, left=2.5)
        assert (answer, context.told[0]) == (b"answer", None)
        assert asked == [{APPLICATION: "bf16kit.m", SECONDS_LEFT: "2.500000"}]

    @pytest.mark.parametrize("code", [StatusCode.NOT_FOUND, StatusCode.UNAVAILABLE])
    def test_a_request_goes_to_the_front_if_the_application_is_missing_or_cannot_start(self, code: StatusCode) -> None:
        async def rays(seen: Any) -> bytes:
            if dict(seen.invocation_metadata())[APPLICATION] == "bf16kit.m":
                seen.set_code(code)
                seen.set_details("Application 'bf16kit.m' not found.")
                return b""
            return Frame.of(Status(StatusCode.NOT_FOUND, "unknown model 'm'")).SerializeToString()

        _, context, asked = self._ask(rays)
        assert [each[APPLICATION] for each in asked] == ["bf16kit.m", "bf16kit"]
        assert context.told == (StatusCode.NOT_FOUND, "unknown model 'm'")

    @pytest.mark.parametrize(
        ("code", "told"),
        [
            (StatusCode.RESOURCE_EXHAUSTED, StatusCode.RESOURCE_EXHAUSTED),
            (StatusCode.INTERNAL, StatusCode.UNAVAILABLE),
            (StatusCode.UNAVAILABLE, StatusCode.UNAVAILABLE),
            (StatusCode.DEADLINE_EXCEEDED, StatusCode.DEADLINE_EXCEEDED),
        ],
    )
    def test_clients_do_not_get_rays_error_messages(self, code: StatusCode, told: StatusCode) -> None:
        async def rays(seen: Any) -> bytes:
            seen.set_code(code)
            seen.set_details("Traceback (most recent call last): secret")
            return b""

        _, context, _ = self._ask(rays)
        assert context.told[0] is told
        assert "secret" not in context.told[1]

    def test_a_full_queue_is_rejected_with_the_operators_overload_status(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def rays(seen: Any) -> bytes:
            seen.set_code(StatusCode.RESOURCE_EXHAUSTED)
            return b""

        monkeypatch.setenv("BF16KIT_OVERLOAD_STATUS", "UNAVAILABLE")
        _, context, _ = self._ask(rays)
        assert context.told[0] is StatusCode.UNAVAILABLE
        assert "the queue for the replicas is full" in context.told[1]

    def test_an_exception_in_ray_is_reported_without_its_text(self) -> None:
        async def rays(seen: Any) -> bytes:
            raise RuntimeError("secret")

        _, context, _ = self._ask(rays)
        assert context.told[0] is StatusCode.INTERNAL
        assert "secret" not in context.told[1]

    def test_a_message_that_is_too_large_does_not_reach_a_replica(self) -> None:
        async def rays(seen: Any) -> bytes:
            raise AssertionError

        _, context, asked = self._ask(rays, data=bytes((64 << 20) + 1))
        assert context.told[0] is StatusCode.RESOURCE_EXHAUSTED
        assert not asked

    def test_a_stream_goes_to_the_application_of_its_first_requests_model(self) -> None:
        ingress, asked, path = Ingress(), [], f"/{SERVICE}/ModelStreamInfer"

        async def handler(requests: AsyncIterator[bytes], seen: Any) -> AsyncIterator[bytes]:
            asked.append(dict(seen.invocation_metadata())[APPLICATION])
            async for data in requests:
                yield Frame.of(data).SerializeToString()
            yield Frame.of(Status(StatusCode.UNAVAILABLE, "draining")).SerializeToString()

        async def run() -> list[bytes]:
            async def requests() -> AsyncIterator[bytes]:
                for data in (b"\x0a\x01m", b"\x0a\x01n"):
                    yield data

            return [each async for each in found.stream_stream(requests(), context)]

        context = Context()
        ingress._method_handlers[path] = ingress._method_handlers[path]._replace(stream_stream=handler)
        found = ingress.service(type("Details", (), {"method": path}))
        assert asyncio.run(run()) == [b"\x0a\x01m", b"\x0a\x01n"]
        assert asked == ["bf16kit.m"]
        assert context.told == (StatusCode.UNAVAILABLE, "draining")

    def test_an_unknown_path_has_no_handler(self) -> None:
        assert Ingress().service(type("Details", (), {"method": "/a/b"})) is None
        assert len(RPCS) == len({rpc.method for rpc in RPCS.values()})  # Ray looks methods up by their last part


def _program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.ray", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_program_reports_wrong_arguments_without_a_traceback(tmp_path: Path) -> None:
    write_mlp(tmp_path / "m" / "1")
    for arguments, said in (
        (("--repository", str(tmp_path / "none")), "is not a directory"),
        (("--repository", str(tmp_path), "--min-replicas", "0"), "min_replicas is 0"),
        (("--repository", str(tmp_path), "--max-replicas", "0"), "max_replicas 0"),
    ):
        done = _program(*arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert said in done.stderr
