"""A server with as little memory, or as few threads, as a small container allows, and with files of 10 GB."""

import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import figures
import grpc
import numpy as np
import pytest
from artifacts import write_mlp
from attacked import Target
from confinement import confined
from figures import amount
from loopback import infer_request
from offered import INFER
from serverprocess import ServerProcess
from waiting import until

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.grpc.handlers import SERVICE

pytestmark = pytest.mark.hostile
_MESSAGE = infer_request("mlp", x=np.ones((1, 16), np.float32)).SerializeToString()
_ROWS = 1 << 16
_LARGE = infer_request("mlp", x=np.ones((_ROWS, 16), np.float32)).SerializeToString()  # 4 MiB
_SPARSE = 10 << 30  # bytes


def codes_of(target: Target, message: bytes, count: int, at_once: int) -> dict[str, int]:
    """Send the message this many times, each over a connection of its own; return how often each status came."""

    def send() -> str:
        options = [("grpc.use_local_subchannel_pool", 1)]
        options += [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
        with grpc.insecure_channel(target.address, options=options) as channel:
            call: Any = channel.unary_unary(INFER)
            error = call.future(message, timeout=60).exception()
            return "OK" if error is None else error.code().name

    with ThreadPoolExecutor(at_once) as pool:
        return Counter(pool.map(lambda _: send(), range(count)))


def test_in_512_mb_of_memory_a_server_lives_through_many_large_requests(tmp_path: Path) -> None:
    """Some are rejected, because the server bounds what all requests hold by its container's memory."""
    write_mlp(tmp_path / "repository" / "mlp" / "1")
    (tmp_path / "repository" / "mlp" / "serving.yaml").write_text(f"max_batch_size: {_ROWS}\n")
    with confined("memory.max", 512 << 20, tmp_path, "--repository", tmp_path / "repository") as (server, _):
        target = Target(server.wait_ready())
        with target.stays_healthy():
            codes = codes_of(target, _LARGE, amount(40, 400), 20)
        assert codes_of(target, _MESSAGE, 20, 4) == {"OK": 20}
        figures.record(how_much=f"{sum(codes.values())} requests of 4 MiB, 20 at a time", **codes)
        assert codes.keys() <= {"OK", "RESOURCE_EXHAUSTED"}
        assert codes.get("OK", 0) > 0


def test_without_threads_left_calls_end_and_all_are_answered_once_there_are_some(tmp_path: Path) -> None:
    write_mlp(tmp_path / "repository" / "mlp" / "1")
    with confined("pids.max", 1000, tmp_path, "--repository", tmp_path / "repository") as (server, group):
        target = Target(server.wait_ready())
        assert codes_of(target, _MESSAGE, 5, 1) == {"OK": 5}
        group.change(group.count())  # no further thread can start
        codes = codes_of(target, _LARGE, 40, 20)
        group.change(1000)
        with target.stays_healthy():
            assert codes_of(target, _MESSAGE, 40, 20) == {"OK": 40}
        figures.record(how_much="40 requests, 20 at a time", **codes)
        server.terminate()
        assert server.exit_code() == 0


@pytest.mark.parametrize(
    "file",
    ["1/weights.bf16", "1/manifest.json", "1/cpu.onnx", "1/golden.safetensors", "serving.yaml", "labels.txt"],
)
def test_a_file_of_10_gb_is_refused_unread_and_another_model_is_served(tmp_path: Path, file: str) -> None:
    """It has no blocks on the disk, and would fill any memory."""
    repository = tmp_path / "repository"
    for name in ("good", "sparse"):
        write_mlp(repository / name / "1")
    if file == "labels.txt":
        (repository / "sparse" / "serving.yaml").write_text("labels: {y: labels.txt}\n")
    with (repository / "sparse" / file).open("ab") as opened:
        opened.truncate(_SPARSE)
    begun = time.monotonic()
    with ServerProcess("--repository", repository) as server:
        until(lambda: server.of_model("model_ready", "good") == 1, what="the good model")
        until(lambda: re.search("(WARNING|ERROR).*sparse", server.log), what="the reason why the other is not served")
        target = Target(server)
        figures.record(how_much="10 GiB", seconds=f"{time.monotonic() - begun:.1f}", rss_mib=target.rss() >> 20)
        assert server.of_model("model_ready", "sparse") < 1
        server.check_memory()
        assert "Traceback" not in server.log


def test_cycles_of_loads_and_unloads_leave_nothing_behind(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp" / "1")
    paths = ("RepositoryModelLoad", "RepositoryModelUnload", "ModelInfer")
    with ServerProcess("--repository", tmp_path, "--model-control", "explicit") as server:
        until(lambda: server.get("/readyz")[0] == 200, what="a server without models")
        target = Target(server)
        with grpc.insecure_channel(target.address) as channel:
            calls: list[Any] = [channel.unary_unary(f"/{SERVICE}/{path}") for path in paths]
            load, unload, infer = calls

            def cycle() -> None:
                load(pb.RepositoryModelLoadRequest(model_name="mlp").SerializeToString(), timeout=60)
                infer(_MESSAGE, timeout=60)
                unload(pb.RepositoryModelUnloadRequest(model_name="mlp").SerializeToString(), timeout=60)

            for _ in range(10):
                cycle()
            before = held(server)
            with target.stays_healthy():
                for _ in range(amount(30, 2000)):
                    cycle()
            until(
                lambda: all(now <= then + 2 for now, then in zip(held(server), before, strict=True)), what="no growth"
            )
        figures.record(how_much=f"{amount(30, 2000):,} cycles", threads=before[0], files=before[1], series=before[2])


def held(server: ServerProcess) -> tuple[int, int, int]:
    """Return the numbers of threads, open files and series."""
    files = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    series = sum(not line.startswith("#") for line in server.get("/metrics")[1].splitlines())
    return server.status("Threads"), files, series
