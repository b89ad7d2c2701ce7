"""``bf16kit.serve``: a real server in a child process, and its end."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferInput
from waiting import until

import bf16kit
from bf16kit.numerics.tensors import Array


@pytest.mark.long
def test_a_server_answers_as_the_loaded_model_does_and_ends_with_the_block(
    converted: bf16kit.Conversion, x: Array
) -> None:
    with bf16kit.serve(converted.path.parents[1], max_in_flight=7, log_format="json") as server:
        given = InferInput("x", [3, 16], "FP32")
        given.set_data_from_numpy(x[:3])
        with server.client() as client:
            answer = client.infer("mlp", [given]).as_numpy("output")
        with urllib.request.urlopen(f"{server.http_address}/metrics") as page:
            assert "bf16kit_requests_total" in page.read().decode()
        assert server.log.startswith("{")
    expected = bf16kit.load(converted.path)(x[:3])["output"]
    assert np.array_equal(answer, expected)
    assert (server.process.returncode, "ended" in repr(server)) == (0, True)
    assert server.stop() == 0  # once more


@pytest.mark.long
def test_a_server_that_does_not_become_ready_is_an_error_with_the_end_of_its_log(
    converted: bf16kit.Conversion, tmp_path: Path
) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "manifest.json").write_text("{}")
    with pytest.raises(bf16kit.RuntimeFailure, match=r"is not ready after 4 s; its log ends:(.|\n)*manifest\.json"):
        bf16kit.serve(tmp_path, ready_seconds=4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(bf16kit.RuntimeFailure, match=rf"ended with exit code 2; its log ends:(.|\n)*{port}"):
            bf16kit.serve(converted.path.parents[1], http_port=port)


def test_a_wrong_key_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for config, said in (({"grpc_prt": 1}, "grpc_prt"), ({"max_in_flight": 0}, "max_in_flight")):
        with pytest.raises(bf16kit.UsageError, match=said):
            bf16kit.serve(tmp_path, **config)
    with pytest.raises(bf16kit.UsageError, match="is not a directory"):
        bf16kit.serve(tmp_path / "absent")


@pytest.mark.long
def test_a_server_ends_when_its_parent_is_killed(converted: bf16kit.Conversion) -> None:
    repository = str(converted.path.parents[1])
    program = (
        f"import bf16kit, time; s = bf16kit.serve({repository!r}); print(s.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.send_signal(signal.SIGKILL)
    until(lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes())
