"""Traces of a server process: an unmodified tritonclient sends requests, and a real collector receives the spans."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from artifacts import write_mlp
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import wait_replaced

pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.grpc", reason="needs the extra otel: pip install 'bf16kit[otel]'"
)

from collector import collecting

pytestmark = pytest.mark.long
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASKED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
EXPLICIT = ("--model-control", "explicit", "--load-model", "*")  # clients may change settings


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    for name in ("mlp", "other"):
        write_mlp(root / name / "1")
        (root / name / "serving.yaml").write_text("max_queue_delay_ms: 1\n")  # requests wait and are batched
    return root


def traced(endpoint: str, rate: int = 1_000_000, **more: str) -> dict[str, str]:
    return {
        "BF16KIT_TRACE_RATE": str(rate),
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "200",  # ms
        **more,
    }


def ask(server: ServerProcess, times: int = 1, model: str = "mlp", headers: dict[str, str] | None = None) -> None:
    for _ in range(times):
        server.infer(model, {"x": np.ones((1, 16), np.float32)}, headers=headers)


def test_the_server_continues_the_clients_trace(repository: Path, serve: Serve) -> None:
    with collecting() as (collector, endpoint):
        of_operators = {
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=of-the-collector",
            "OTEL_SERVICE_NAME": "shop-embeddings",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
        }
        server = serve("--repository", repository, env=traced(endpoint) | of_operators).wait_ready()
        ask(server, headers=ASKED)
        (span,) = collector.wait(1)
        children = collector.children(span)
        assert (span.trace, span.parent) == (TRACE, PARENT)
        assert set(children) == {"queue", "gather", "run", "split"}
        assert sum(child.seconds for child in children.values()) <= span.seconds
        assert all(span.begin <= child.begin <= child.end <= span.end for child in children.values())
        assert collector.resource["service.name"] == "shop-embeddings"
        assert collector.resource["deployment.environment"] == "test"
        assert collector.headers["api-key"] == "of-the-collector"
        # The metrics page counts a delivery a moment later.
        until(lambda: server.metric('bf16kit_traces_total{outcome="exported"}') == 1)


def test_waiting_spans_are_delivered_before_the_server_exits(repository: Path, serve: Serve) -> None:
    with collecting() as (collector, endpoint):
        server = serve("--repository", repository, env=traced(endpoint, rate=1)).wait_ready()
        collector.open.clear()
        ask(server, 150)
        server.terminate()
        until(lambda: "draining" in server.log)
        collector.open.set()
        assert server.exit_code() == 0
        assert len(collector.servers()) == 150


def test_every_worker_traces_its_own_requests(repository: Path, serve: Serve) -> None:
    with collecting() as (collector, endpoint):
        server = serve("--repository", repository, "--workers", "2", env=traced(endpoint, rate=1)).wait_ready()
        asked = 0

        def both() -> bool:
            nonlocal asked
            ask(server)
            asked += 1
            return len(collector.processes) == 2

        until(both, 60, "traces of both workers")
        server.stop()
        assert len(collector.servers()) == asked


def test_a_restarted_worker_has_the_log_and_trace_settings_of_the_others(repository: Path, serve: Serve) -> None:
    """A model's own settings apply to it; its other settings are the server's."""
    with collecting() as (collector, endpoint):
        env = traced(endpoint, rate=1)
        server = serve("--repository", repository, "--workers", "2", *EXPLICIT, env=env).wait_ready()
        # Each client has a connection of its own, which any worker may accept.
        own = [("grpc.use_local_subchannel_pool", 1)]
        with triton.InferenceServerClient(server.target, channel_args=own) as client:
            client.update_log_settings({"log_verbose_level": 3})
            client.update_trace_settings("mlp", {"trace_count": "5"})
            client.update_trace_settings(settings={"trace_rate": "7"})

        def seen() -> tuple[int, str, str]:
            with triton.InferenceServerClient(server.target, channel_args=own) as client:
                of_model = client.get_trace_settings("mlp").settings
                verbose = client.get_log_settings().settings["log_verbose_level"].uint32_param
            return verbose, of_model["trace_count"].value[0], of_model["trace_rate"].value[0]

        assert {seen() for _ in range(10)} == {(3, "5", "7")}
        worker = int(re.findall(r"worker 1 is started: pid (\d+)", server.log)[-1])
        os.kill(worker, signal.SIGKILL)
        wait_replaced(server, worker)
        assert {seen() for _ in range(20)} == {(3, "5", "7")}
        assert collector.spans == []
