"""Replicas behind Ray's proxy give clients the same responses as a server of one process."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from raycluster import METHODS, PATIENCE, Served, X, call_rpc, empty, request
from waiting import until

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.grpc.handlers import SERVICE

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # warnings of Ray and its libraries
HEALTH = "/grpc.health.v1.Health"
DIFFERENT = ("RepositoryModelLoad", "RepositoryModelUnload")  # the message says why Ray does not support them
SETTINGS = {  # a server of one process has these, and the front does not
    "LogSettings": pb.LogSettingsRequest(
        settings={"log_verbose_level": pb.LogSettingsRequest.SettingValue(uint32_param=0)}
    ),
    "TraceSetting": pb.TraceSettingRequest(settings={"trace_rate": pb.TraceSettingRequest.SettingValue(value=["0"])}),
}


def test_a_request_gets_the_same_bytes_as_from_a_plain_server(served: Served, plain: Any) -> None:
    asked = request(id="7")
    assert served.ask("ModelInfer", asked) == call_rpc(plain, "ModelInfer", asked)


def test_an_unmodified_triton_client_works(served: Served) -> None:
    client = triton.InferenceServerClient(served.address)
    x = triton.InferInput("x", [1, 16], "FP32")
    x.set_data_from_numpy(X)
    assert np.isfinite(client.infer("mlp", [x]).as_numpy("y")).all()
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mlp")
    assert client.get_model_metadata("mlp").inputs[0].name == "x"
    assert client.get_model_config("mlp").config.max_batch_size == 32
    index = client.get_model_repository_index().models
    assert {(each.name, each.state) for each in index} == {("mlp", "READY"), ("slow", "READY")}
    assert client.get_inference_statistics("mlp").model_stats[0].inference_stats.success.count >= 1
    client.close()


@pytest.mark.parametrize("method", [m.name for m in METHODS if not m.client_streaming and m.name not in DIFFERENT])
def test_every_rpc_responds_as_a_plain_server_does(served: Served, plain: Any, method: str) -> None:
    """Each RPC gets an empty request: both servers respond, or both return the same code, with reasons of their own."""
    code, said = served.ask(method, empty(method))
    other, words = call_rpc(plain, method, empty(method))
    if method in SETTINGS:
        assert code is StatusCode.UNIMPLEMENTED
        assert served.ask(method, SETTINGS[method].SerializeToString()) == (code, said)
        return
    assert code is other
    if code not in (StatusCode.OK, StatusCode.UNIMPLEMENTED):
        assert said == words


@pytest.mark.parametrize("method", DIFFERENT)
def test_models_are_not_loaded_over_the_network(served: Served, method: str) -> None:
    code, words = served.ask(method, pb.RepositoryModelLoadRequest(model_name="mlp").SerializeToString())
    assert code is StatusCode.UNIMPLEMENTED
    assert "models are not loaded over the network here: change the repository" in str(words)


@pytest.mark.parametrize(
    "asked",
    [
        request("nobody"),
        request("mlp", model_version="9"),
        request("mlp", model_version="one"),
        request("nobody", model_version="one"),
        pb.ModelInferRequest(model_name="mlp").SerializeToString(),
        request("bf16kit"),
        request("a#b/../c"),
        b"",
        b"\xff\xff\xff",
        request("mlp") + b"\xff",
    ],
)
def test_rejected_requests_get_the_same_error_as_from_a_plain_server(served: Served, plain: Any, asked: bytes) -> None:
    assert served.ask("ModelInfer", asked) == call_rpc(plain, "ModelInfer", asked)


def test_a_clients_metadata_cannot_redirect_its_request(served: Served) -> None:
    """Ray's proxy would route a request to any application that the metadata name."""
    steering = [("application", "bf16kit.slow"), ("request_id", "x")]
    code, answer = served.ask("ModelInfer", request(), metadata=steering)
    assert code is StatusCode.OK
    assert isinstance(answer, bytes)
    assert pb.ModelInferResponse.FromString(answer).model_name == "mlp"


def test_a_message_that_is_too_large_and_an_unknown_rpc_are_rejected(served: Served) -> None:
    code, words = served.ask("ModelInfer", request("mlp", id="x" * (1 << 20)))
    assert code is StatusCode.RESOURCE_EXHAUSTED
    assert "Traceback" not in str(words)
    assert served.ask("NoSuchMethod", b"")[0] is StatusCode.UNIMPLEMENTED


def test_the_timeout_of_a_request_is_applied_by_its_replica(served: Served) -> None:
    """It tells the replica not to wait 3 s for other requests. The deadline of a call does not reach it."""
    begun = time.monotonic()
    message = pb.ModelInferRequest.FromString(request("slow"))
    message.parameters["timeout"].int64_param = 2_500_000  # microseconds
    assert served.ask("ModelInfer", message.SerializeToString())[0] is StatusCode.OK
    assert time.monotonic() - begun < 2.9


@pytest.mark.parametrize("timeout", [1.5, 60])
def test_a_request_whose_client_leaves_or_is_late_is_not_run(served: Served, timeout: float) -> None:
    call: Any = served.channel.unary_unary(f"/{SERVICE}/ModelInfer")

    def cancelled() -> float:
        return served.metric("bf16kit_requests_total", model="slow", code="CANCELLED")

    ran = served.metric("bf16kit_executions_total", model="slow")
    sent = [(cancelled(), call.future(request("slow"), timeout=timeout))]

    def queued() -> bool:
        if sent[-1][1].done():  # it was late before it was seen: the machine is busy
            sent.append((cancelled(), call.future(request("slow"), timeout=timeout)))
        return served.metric("bf16kit_queue_depth", model="slow") == 1

    until(queued, PATIENCE, "a request in the queue")
    before, leaving = sent[-1]
    if timeout == 60:
        leaving.cancel()
    until(lambda: cancelled() > before, PATIENCE, "the refusal in a replica's metrics")
    assert served.metric("bf16kit_executions_total", model="slow") == ran


def test_requests_beyond_the_queue_limit_are_rejected(served: Served) -> None:
    with ThreadPoolExecutor(24) as pool:
        codes = [code for code, _ in pool.map(lambda _: served.infer("slow"), range(24))]
    assert set(codes) == {StatusCode.OK, StatusCode.RESOURCE_EXHAUSTED}


class TestStreams:
    def _answers(self, served: Served, *asked: bytes, **more: Any) -> list[pb.ModelStreamInferResponse]:
        call: Any = served.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        return [pb.ModelStreamInferResponse.FromString(each) for each in call(iter(asked), timeout=60, **more)]

    def test_responses_come_in_order_and_an_error_does_not_end_the_stream(self, served: Served) -> None:
        asked = [request(id=str(n)) for n in range(5)]
        asked[2] = request("mlp", id="2", model_version="9")
        found = self._answers(served, *asked)
        assert [each.infer_response.id for each in found] == ["0", "1", "2", "3", "4"]
        assert [bool(each.error_message) for each in found] == [False, False, True, False, False]

    def test_a_stream_ends_with_the_error_status_if_the_client_requests_it(self, served: Served) -> None:
        with pytest.raises(grpc.RpcError) as ended:
            self._answers(served, request("nobody"), metadata=[("triton_grpc_error", "true")])
        assert ended.value.code() is StatusCode.NOT_FOUND


def test_health_is_checked_and_watched_as_on_a_plain_server(served: Served, plain: Any) -> None:
    for service in ("", SERVICE, "mlp", "nobody"):
        asked = health_pb2.HealthCheckRequest(service=service).SerializeToString()
        assert served.ask(f"{HEALTH}/Check", asked) == call_rpc(plain, f"{HEALTH}/Check", asked)
        first = []
        for channel in (served.channel, plain):
            watch: Any = channel.unary_stream(f"{HEALTH}/Watch")
            answers = watch(asked, timeout=60)
            first.append(next(answers))
            answers.cancel()
        assert first[0] == first[1]


def test_reflection_lists_the_services(served: Served) -> None:
    database = ProtoReflectionDescriptorDatabase(served.channel)
    assert SERVICE in database.get_services()
    assert database.FindFileContainingSymbol(SERVICE).package == "inference"


class TestMetrics:
    def test_every_replica_is_a_target_for_prometheus(self, served: Served) -> None:
        """Each target has the metrics of one replica, which serves one model."""
        until(lambda: len(served.targets()) == 4, PATIENCE, "two replicas of each model among the targets")
        targets = served.targets()
        assert len(set(targets)) == 4
        pages = [served.get(f"http://{target}/metrics") for target in targets]
        ready = [re.findall(r'^bf16kit_model_ready{model="(\w+)",version="\d+"} 1\.0$', page, re.M) for page in pages]
        assert sorted(ready) == [["mlp"], ["mlp"], ["slow"], ["slow"]]

    def test_the_replicas_metrics_count_every_request(self, served: Served) -> None:
        before = served.metric("bf16kit_requests_total", model="mlp", code="OK")
        assert all(served.infer()[0] is StatusCode.OK for _ in range(10))
        assert served.metric("bf16kit_requests_total", model="mlp", code="OK") == before + 10

    def test_statistics_sum_all_replicas(self, served: Served) -> None:
        """The counts must be exact at once, not a report later: perf_analyzer uses the difference of two."""
        asked = pb.ModelStatisticsRequest(name="mlp").SerializeToString()

        def count() -> int:
            started = time.monotonic()
            _, answer = served.ask("ModelStatistics", asked)
            assert time.monotonic() - started < 5
            assert isinstance(answer, bytes)
            return pb.ModelStatisticsResponse.FromString(answer).model_stats[0].inference_count

        before = count()
        for _ in range(7):
            served.infer()
        assert count() == before + 7

    def test_the_front_has_pages(self, served: Served) -> None:
        assert served.get(f"{served.http}/readyz").strip() == "ready"
        assert '"name":"mlp","version":"1","state":"READY"' in served.get(f"{served.http}/status.json")
