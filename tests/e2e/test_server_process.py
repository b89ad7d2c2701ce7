"""Run the server as a process on real artifacts, and use it through an unmodified tritonclient."""

import json
import socket
import ssl
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from artifacts import write_mlp
from loopback import infer_request
from serverprocess import Serve
from tlsfiles import Authority
from waiting import until
from workerprocesses import Client

ROWS = np.random.default_rng(0).standard_normal((20, 16)).astype(np.float32)
X = {"x": ROWS[:1]}


def test_tritonclient_gets_outputs_close_to_the_fp32_reference(tmp_path: Path, serve: Serve) -> None:
    golden = write_mlp(tmp_path / "mlp" / "1").golden()
    server = serve("--repository", tmp_path).wait_ready()
    np.testing.assert_allclose(server.infer("mlp", golden.inputs)["y"], golden.outputs["y"], atol=0.05)
    with triton.InferenceServerClient(server.target) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("mlp")
        assert client.get_model_config("mlp", as_json=True)["config"]["max_batch_size"] == 32
        stats = client.get_inference_statistics("mlp", as_json=True)["model_stats"][0]
    assert (stats["inference_count"], stats["execution_count"]) == ("4", "1")


@pytest.mark.long
def test_sigterm_finishes_requests_in_flight_rejects_new_ones_and_exits_0(tmp_path: Path, serve: Serve) -> None:
    """The queue waits two seconds for a fuller batch, which keeps one request in flight meanwhile."""
    write_mlp(tmp_path / "mlp" / "1")
    (tmp_path / "mlp" / "serving.yaml").write_text("max_queue_delay_ms: 2000\n")
    server = serve("--repository", tmp_path).wait_ready()
    with ThreadPoolExecutor(1) as caller, Client(server.target) as late:
        grpc.channel_ready_future(late.channel).result(20)  # opens this connection before the port closes
        working = caller.submit(server.infer, "mlp", X)
        until(lambda: server.of_model("requests_in_flight") == 1)
        server.terminate()
        until(lambda: "draining" in server.log)
        until(lambda: server.get("/readyz")[0] == 503)
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            late.infer(x=X["x"])
        assert working.result(60)["y"].shape == (1, 16)
    assert server.exit_code() == 0
    assert "stopped after" in server.log


@pytest.mark.long
def test_a_lame_duck_is_not_ready_but_still_serves(tmp_path: Path, serve: Serve) -> None:
    write_mlp(tmp_path / "mlp" / "1")
    server = serve("--repository", tmp_path, "--lame-duck-seconds", "3").wait_ready()
    with triton.InferenceServerClient(server.target) as client:
        assert client.is_server_ready()
        server.terminate()
        until(lambda: server.get("/readyz")[0] == 503)
        assert not client.is_server_ready()
        assert not client.is_model_ready("mlp")
        assert server.infer("mlp", X)["y"].shape == (1, 16)
        assert "draining" not in server.log
    assert server.exit_code() == 0


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_requests_that_outlast_the_drain_are_cut_off_and_the_exit_code_says_so(
    tmp_path: Path, serve: Serve, workers: str
) -> None:
    """The queue waits a minute for a fuller batch, and the drain lasts half a second."""
    write_mlp(tmp_path / "mlp" / "1")
    (tmp_path / "mlp" / "serving.yaml").write_text("max_queue_delay_ms: 60000\n")
    environment = {"BF16KIT_DRAIN_SECONDS": "0.5"}
    server = serve("--repository", tmp_path, "--workers", workers, env=environment).wait_ready()
    with Client(server.target) as client:
        call = client.ask("ModelInfer").future(infer_request("mlp", **X))  # a deadline would make it run earlier
        until(lambda: server.of_model("requests_in_flight") == 1)
        server.stop(1)
        assert call.code() is not grpc.StatusCode.OK
    assert "requests were cut off: still in flight after 0.5 s" in server.log


@pytest.mark.long
def test_sigterm_while_models_load_exits_0(tmp_path: Path, serve: Serve) -> None:
    for index in range(20):
        write_mlp(tmp_path / f"mlp{index}" / "1")
    server = serve("--repository", tmp_path)
    server.ports()
    server.stop()


@pytest.mark.parametrize("which", ["grpc", "http"])
def test_a_port_in_use_gives_one_clear_line_and_exit_code_2(tmp_path: Path, serve: Serve, which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = serve("--repository", tmp_path, f"--{which}-port", str(port))
        assert server.exit_code() == 2
    assert f"port {port} on 127.0.0.1 is in use" in server.log
    assert f"--{which}-port" in server.log
    assert "Traceback" not in server.log


def test_with_tls_tokens_and_json_logs_a_scraper_needs_its_token_and_the_log_is_json(
    tmp_path: Path, serve: Serve
) -> None:
    repository, token, tokens = tmp_path / "repository", "reader-0123456789abcdef", tmp_path / "tokens"
    write_mlp(repository / "mlp" / "1")
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    tokens.write_text(f"{token} read\n")
    tokens.chmod(0o600)
    guarded = ("--tls-certificate", pair.certificate, "--tls-key", pair.key, "--token-file", tokens)
    server = serve("--repository", repository, *guarded, "--log-format", "json")
    context = ssl.create_default_context(cafile=str(authority.certificate))

    def get(path: str, **headers: str) -> int:
        asked = urllib.request.Request(f"https://127.0.0.1:{server.ports()[1]}{path}", headers=headers)
        try:
            with urllib.request.urlopen(asked, timeout=20, context=context) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    until(lambda: get("/readyz") == 200, 60, "ready")
    assert [get("/metrics"), get("/"), get("/metrics", Authorization=f"Bearer {token}")] == [401, 401, 200]
    server.stop()
    events = [json.loads(line) for line in server.lines]
    assert any("'mlp' version 1 is ready" in event["message"] for event in events)
    assert token not in server.log
