import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bf16kit.service.cli import main

FLAGS = (
    "--repository", "--host", "--grpc-port", "--http-port", "--http-inference", "--device", "--workers",
    "--model-control", "--load-model",
    "--tls-certificate", "--tls-key", "--tls-client-ca", "--token-file", "--log-format", "--evidence",
    "--lame-duck-seconds", "--config", "--version", "--help",
)  # fmt: skip
COMMANDS = ("bench", "check", "evidence", "health", "list")


def bf16_serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bf16kit.service", *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
    )


def test_help_is_quick_because_it_imports_no_heavy_package_and_names_every_flag_and_command() -> None:
    code = (
        "import sys; from bf16kit.service.cli import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"grpc", "numpy", "onnxruntime", "pydantic", "prometheus_client", "torch"}
    *lines, modules = done.stdout.splitlines()
    assert heavy & set(modules.split()) == set()
    assert tuple(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", done.stdout, re.MULTILINE)) == FLAGS
    assert [each for each in COMMANDS if not any(line.startswith(f"  {each} ") for line in lines)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_an_unknown_one_is_wrong_usage(command: str) -> None:
    done = CliRunner().invoke(main, [command, "--help"])
    assert done.exit_code == 0, done.output
    assert "Exit code" in done.output
    assert CliRunner().invoke(main, [f"{command}x"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repository", "/no/such/place"], "'/no/such/place' is not a directory"),
        ([], "'repository' is missing"),
        (["--repository", ".", "--workers", "0"], "'workers' is 0"),
        (["--poll-seconds", "2"], "set BF16KIT_POLL_SECONDS in the environment, or poll_seconds in the server.yaml of"),
        (["check", "--threads=2"], "--threads is not a flag: set BF16KIT_THREADS in the environment, or threads in"),
        (["--profile", "cpu"], "--profile is not a flag: set profile in REPOSITORY/MODEL/serving.yaml, for each model"),
        (["serve"], "No such command 'serve'. To serve, give --repository DIRECTORY and no command."),
        (["--grpc-prot", "1"], "No such option"),
        (["--repository", ".", "--config", "/no/such/file"], "/no/such/file: cannot be read"),
        (["--grpc-port", "x"], "'x' is not a valid integer"),
        (["--repository", ".", "--token-file", "/no/such/file"], "token_file /no/such/file: cannot be read"),
        (["--repository", ".", "--tls-key", "k"], "tls_key is given without tls_certificate"),
        (["--repository", ".", "--tls-key", "k", "--tls-certificate", "c"], "tls_certificate c: cannot be read"),
    ],
)
def test_wrong_usage_gives_a_message_without_traceback_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = bf16_serve(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_misspelt_variable_is_a_warning_in_the_servers_log_and_a_wrong_kernel_path_ends_it(tmp_path: Path) -> None:
    asked = ("--repository", str(tmp_path), "--http-port", "0", "--grpc-port")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the port is taken, so the server ends at once
        done = bf16_serve(*asked, str(taken.getsockname()[1]), BF16KIT_HTTP_PROT="9000")
    assert done.returncode == 2
    variables = "unknown environment variables are ignored: 'BF16KIT_HTTP_PROT' (did you mean BF16KIT_HTTP_PORT?);"
    assert f" WARNING bf16kit.service.cli: {variables}" in done.stderr
    done = bf16_serve(*asked, "0", BF16KIT_KERNEL_PATH="fast")
    assert done.returncode == 2
    allowed = "amx, avx512_bf16, avx512f, avx2, neon_bf16, neon, portable and off"
    assert f"BF16KIT_KERNEL_PATH is 'fast'; allowed are {allowed}" in done.stderr
