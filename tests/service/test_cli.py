from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli import main

FLAGS = ("--repository", "--host", "--grpc-port", "--http-port", "--device", "--workers", "--config")


def test_help_names_every_flag() -> None:
    output = CliRunner().invoke(main, ["--help"]).output
    assert [flag for flag in FLAGS if flag not in output] == []


def test_help_is_quick_because_it_imports_no_heavy_package() -> None:
    code = "import sys; from service.cli import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds = time.monotonic() - begun
    heavy = {"grpc", "numpy", "onnxruntime", "pydantic", "prometheus_client", "torch"}
    assert heavy & set(done.stdout.split()) == set()
    assert seconds < 5  # the limit is 0.5 s on an idle machine; it depends on the imports, which are checked above


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repository", "/no/such/place"], "'/no/such/place' is not a directory"),
        ([], "'repository' is missing"),
        (["--repository", ".", "--workers", "0"], "'workers' is 0"),
        (["--repository", ".", "--config", "/no/such/file"], "/no/such/file: cannot be read"),
        (["--grpc-port", "x"], "'x' is not a valid integer"),
    ],
)
def test_wrong_usage_gives_a_message_without_traceback_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service", *arguments], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_variable_is_a_warning_in_the_servers_log(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the port is taken, so the server ends at once
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "service", "--repository", str(tmp_path), "--http-port", "0", "--grpc-port", port],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "BF16KIT_HTTP_PROT": "9000"},
        )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "unknown environment variables" in line]
    assert (
        " WARNING service.cli: unknown environment variables are ignored: 'BF16KIT_HTTP_PROT' (BF16KIT_HTTP_PORT?);"
        in line
    )


def test_an_unknown_kernel_path_ends_the_server_at_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service", "--repository", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "BF16KIT_KERNEL_PATH": "fast"},
    )
    assert done.returncode == 2
    assert "BF16KIT_KERNEL_PATH is 'fast'; allowed are avx512_bf16, avx512f, avx2, portable, amx and off" in done.stderr
