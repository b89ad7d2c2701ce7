"""Run the server as a process on real artifacts, and use it through an unmodified tritonclient."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from artifacts import write_lookup, write_mlp
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
def test_traffic_updates_the_drift_metrics_and_promtool_accepts_the_page(tmp_path: Path, serve: Serve) -> None:
    write_mlp(tmp_path / "mlp" / "1", logits=True)
    (tmp_path / "mlp" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 1000, max_rows: 32}\n")
    server = serve("--repository", tmp_path).wait_ready()

    def measured() -> float:
        return server.of_model("drift_samples_total", outcome="measured")

    def ratio(end: str = "") -> float:
        return server.of_model(f"drift_budget_ratio{end}", metric="relative_l2", output="y")

    assert measured() == 0
    server.infer("mlp", {"x": ROWS})
    until(lambda: measured() == 20, what="twenty samples measured")
    assert server.of_model("drift_relative_l2_count", output="y") == 20
    assert 0 < ratio() < 1
    assert ratio("_high") == math.inf  # the interval needs several requests: the rows of one are one sample
    for _ in range(9):
        server.infer("mlp", {"x": ROWS})
    until(lambda: measured() == 200, what="two hundred samples measured")
    assert 0 < ratio("_low") <= ratio("_high") < 1
    assert server.of_model("drift_effective_samples", output="y") > 9
    assert server.of_model("drift_over_budget") == 0
    assert server.of_model("requests_total", code="OK") == 10
    assert server.of_model("model_ready") == 1
    if (promtool := shutil.which("promtool")) is not None:
        text = server.get("/metrics")[1]
        checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_models_over_budget_or_damaged_are_never_ready_and_the_log_says_why(tmp_path: Path, serve: Serve) -> None:
    write_mlp(tmp_path / "spoilt" / "1", spoil=0.5)
    write_lookup(tmp_path / "good" / "1")
    write_mlp(tmp_path / "damaged" / "1")
    weights = tmp_path / "damaged" / "1" / "weights.bf16"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    server = serve("--repository", tmp_path)
    until(lambda: server.log.count("is unavailable") == 2)
    until(lambda: "'good' version 1 is ready" in server.log, what="the other model")
    assert "model 'spoilt' version 1 is unavailable: golden samples are over the drift budget" in server.log
    (said,) = [line for line in server.lines if "model 'damaged' version 1 is unavailable" in line]
    assert "weights.bf16" in said
    assert server.get("/readyz")[0] == 503
    assert "golden samples are over the drift budget" in server.get("/status.json")[1]
    for name in ("spoilt", "damaged"):
        with pytest.raises(triton.InferenceServerException, match="NOT_FOUND"):
            server.infer(name, X)


def test_a_server_with_an_empty_repository_is_live_but_not_ready_and_logs_it(tmp_path: Path, serve: Serve) -> None:
    server = serve("--repository", tmp_path)
    assert (server.get("/livez")[0], server.get("/readyz")[0]) == (200, 503)
    assert "is empty: serving, but not ready" in server.log
    assert json.loads(server.get("/status.json")[1])["models"] == []
    with triton.InferenceServerClient(server.target) as client:
        assert (client.is_server_live(), client.is_server_ready()) == (True, False)
    server.stop()


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


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_debug_log_has_a_line_for_each_request_without_its_payload(tmp_path: Path, serve: Serve, kind: str) -> None:
    write_lookup(tmp_path / "lookup" / "1")
    server = serve("--repository", tmp_path, "--log-format", kind, env={"BF16KIT_LOG_LEVEL": "debug"}).wait_ready()
    payload = 987_654_321  # not a row of the table: the error message contains it
    server.infer("lookup", {"ids": np.array([[1, 1]])}, request_id="r 0")
    with pytest.raises(triton.InferenceServerException, match=str(payload)):
        server.infer("lookup", {"ids": np.array([[payload, 1]])}, request_id="r 1")
    until(lambda: server.log.count("request_id") == 2, what="two lines")
    answered, refused = [line for line in server.lines if "request_id" in line]
    if kind == "json":
        event = json.loads(answered)
        assert (event["model"], event["request_id"], event["code"]) == ("lookup", "r 0", "OK")
        assert event["total_s"] > event["compute_s"] > 0
        assert json.loads(refused)["code"] == "INVALID_ARGUMENT"
    else:
        assert 'request answered model=lookup version=1 request_id="r 0" code=OK total_s=0.' in answered
        assert 'request_id="r 1" code=INVALID_ARGUMENT' in refused
    assert str(payload) not in server.log


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


def test_a_pipe_in_place_of_the_token_file_stops_no_request_and_no_stop(tmp_path: Path, serve: Serve) -> None:
    """Opening a pipe that nobody writes to would block, also after it was removed."""
    tokens, token = tmp_path / "tokens", "client-0123456789abcdef"
    write_mlp(tmp_path / "repository" / "mlp" / "1")
    tokens.write_text(f"{token} infer\n")
    tokens.chmod(0o600)
    server = serve("--repository", tmp_path / "repository", "--token-file", tokens).wait_ready()

    def answered() -> bool:
        headers = {"authorization": f"Bearer {token}"}
        return server.infer("mlp", X, headers=headers, client_timeout=20).keys() == {"y"}

    assert answered()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").rename(tokens)
    until(lambda: answered() and "it is not a regular file" in server.log)
    tokens.unlink()
    until(lambda: answered() and "No such file" in server.log)
    assert server.log.count("the tokens cannot be read again; the old ones stay in force") == 2
    server.stop()


def test_unusable_tls_or_token_files_give_one_clear_line_and_exit_code_2(tmp_path: Path, serve: Serve) -> None:
    wrong = {
        ("--token-file", str(tmp_path / "none")): "token_file .*none: cannot be read",
        ("--tls-key", "k"): "tls_key is given without tls_certificate",
        ("--tls-key", "k", "--tls-certificate", "c"): "tls_certificate c: cannot be read",
    }
    servers = [serve("--repository", tmp_path, *flags) for flags in wrong]  # all run at once
    for server, message in zip(servers, wrong.values(), strict=True):
        assert server.exit_code() == 2
        assert re.search(message, server.log)
        assert "Traceback" not in server.log


def test_tritonclient_changes_the_log_settings_of_a_running_server(tmp_path: Path, serve: Serve) -> None:
    write_mlp(tmp_path / "mlp" / "1")
    server = serve("--repository", tmp_path, "--model-control", "explicit", "--load-model", "*").wait_ready()
    server.infer("mlp", X)
    with triton.InferenceServerClient(server.target) as client:
        client.update_log_settings({"log_verbose_level": 1, "log_format": "json"})
        server.infer("mlp", X)
        until(lambda: "request answered" in server.log, what="the line of a request")
        event = json.loads(next(line for line in server.lines if "request answered" in line))
        assert (event["level"], event["code"]) == ("debug", "OK")
        with pytest.raises(triton.InferenceServerException, match="log_file cannot be changed over the network"):
            client.update_log_settings({"log_file": str(tmp_path / "log")})
        seen = client.update_log_settings({"log_verbose_level": 0, "log_format": "default"})
    assert seen.settings["log_format"].string_param == "ISO8601"
    server.infer("mlp", X)
    server.stop()
    assert server.log.count("request answered") == 1
    assert not (tmp_path / "log").exists()
