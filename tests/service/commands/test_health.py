"""``bf16-serve health``: checks the server on this machine, found by the settings that it was started with."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from commanded import Run, one_line
from loopback import LoopbackModel, serving
from tlsfiles import Authority, Pair

from bf16kit.service.config.certificates import CertificateFiles


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "HOST", "GRPC_PORT", "TLS_CERTIFICATE", "TLS_KEY"):
        monkeypatch.delenv(f"BF16KIT_{name}", raising=False)


@pytest.fixture
def silent() -> Iterator[int]:
    """Yield a port that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def unwell(result: Result, reason: str) -> None:
    """Check that the exit code is 1 and that one line gives the reason."""
    assert result.exit_code == 1, result.output
    assert reason in one_line(result), result.stderr


def test_a_ready_server_is_healthy_and_so_are_its_models(run: Run) -> None:
    with serving(LoopbackModel("good")) as served:
        for model in ((), ("good",)):
            done = run("health", *model, "--grpc-port", served.port)
            assert (done.exit_code, done.stdout) == (0, "SERVING\n"), done.output


def test_the_command_checks_readiness_not_liveness(run: Run) -> None:
    with serving(LoopbackModel("good"), LoopbackModel("bad", state="loading")) as served:
        unwell(run("health", "--grpc-port", served.port), "NOT_SERVING: server is not ready; the server's log says why")
        unwell(run("health", "bad", "--grpc-port", served.port), "NOT_SERVING: model 'bad' is not ready")
        unwell(run("health", "nobody", "--grpc-port", served.port), "serves no model 'nobody'")
        assert run("health", "good", "--grpc-port", served.port).exit_code == 0


def test_a_missing_server_and_a_silent_server_give_different_errors(run: Run, silent: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        free = held.getsockname()[1]
    unwell(run("health", "--grpc-port", free), f"127.0.0.1:{free}: no server can be reached there")
    unwell(run("health", "--grpc-port", silent, "--timeout", 0.2), "no answer within 0.2 s")


def test_the_server_is_found_by_its_environment_and_its_file(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent: int
) -> None:
    """A flag overrides the environment, which overrides the file, as for the server."""
    with serving(LoopbackModel()) as served:
        (tmp_path / "server.yaml").write_text(f"grpc_port: {served.port}\nhost: 0.0.0.0\n", "utf-8")
        monkeypatch.setenv("BF16KIT_CONFIG", str(tmp_path / "server.yaml"))
        assert run("health").exit_code == 0
        monkeypatch.setenv("BF16KIT_GRPC_PORT", str(silent))
        unwell(run("health", "--timeout", 0.2), "no answer")
        assert run("health", "--grpc-port", served.port).exit_code == 0
        monkeypatch.setenv("BF16KIT_GRPC_PORT", "")  # counts as not set
        assert run("health").exit_code == 0


def test_a_server_that_listens_everywhere_is_checked_on_the_loopback_interface(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(LoopbackModel()) as served:
        monkeypatch.setenv("BF16KIT_HOST", "0.0.0.0")
        assert run("health", "--grpc-port", served.port).exit_code == 0
    monkeypatch.setenv("BF16KIT_HOST", "::")
    unwell(run("health", "--grpc-port", served.port), f"[::1]:{served.port}")


def test_tls_trusts_the_servers_certificate_whatever_name_it_has_and_no_other(
    run: Run, monkeypatch: pytest.MonkeyPatch, authority: Authority, pair: Pair
) -> None:
    own = authority.sign("elsewhere", names="DNS:models.example")
    with serving(LoopbackModel(), certificates=CertificateFiles(own.certificate, own.key)) as served:
        unwell(run("health", "--grpc-port", served.port), "the server speaks TLS: give its --tls-certificate and")
        for trusted in (own, pair):
            monkeypatch.setenv("BF16KIT_TLS_CERTIFICATE", str(trusted.certificate))
            monkeypatch.setenv("BF16KIT_TLS_KEY", str(trusted.key))
            result = run("health", "--grpc-port", served.port)
            if trusted is own:
                assert result.stdout == "SERVING\n"
            else:
                unwell(result, "no server can be reached there")
    with serving(LoopbackModel()) as plain:
        unwell(run("health", "--grpc-port", plain.port), "the server speaks plain text: leave --tls-certificate and")


def test_a_server_that_requires_client_certificates_gets_one(run: Run, authority: Authority, pair: Pair) -> None:
    files = CertificateFiles(pair.certificate, pair.key, authority.certificate)
    client = authority.sign("prober")
    with serving(LoopbackModel(), certificates=files) as served:
        flags = ["--grpc-port", served.port, "--tls-certificate", pair.certificate, "--tls-key", pair.key]
        unwell(run("health", *flags), "no server can be reached there")  # it does not know that one is required
        flags += ["--tls-client-ca", authority.certificate]
        assert run("health", *flags).exit_code == 0  # the server's own, which that authority has signed
        assert run("health", *flags, "--certificate", client.certificate, "--key", client.key).exit_code == 0
        unwell(run("health", *flags, "--certificate", client.certificate), "give --certificate and --key together")


@pytest.mark.parametrize(
    ("port", "message"), [("0", "give the port"), ("70000", "less than or equal to 65535"), ("x", "valid integer")]
)
def test_an_invalid_port_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch, port: str, message: str) -> None:
    monkeypatch.setenv("BF16KIT_GRPC_PORT", port)
    unwell(run("health"), message)


def test_the_command_imports_no_heavy_package_because_it_runs_every_few_seconds() -> None:
    code = (
        "import contextlib, sys; from bf16kit.service.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['health', '--grpc-port', '1', '--timeout', '0.1'])\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"grpc"} <= set(done.stdout.split())
    assert {"numpy", "onnxruntime", "prometheus_client"} & set(done.stdout.split()) == set()
