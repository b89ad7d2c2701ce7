"""An operator fetches the evidence of a breach from a real server's memory, and the converter explains it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import faults
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from failing import cancellation
from serverprocess import Serve, ServerProcess
from waiting import until

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.evidence import Evidence
from bf16kit.runtime.ort import kernel

pytestmark = pytest.mark.skipif(
    not kernel.configured_kernel().path, reason="weights that are read as stored need the CPU kernel"
)
MANAGE = "manager-0123456789abcdef"
OVER = 'bf16kit_drift_over_budget{model="m",version="1"}'
SECRET = 1234.5  # a client's value, in every row


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    faults.write_pair(root / "m" / "1")
    (root / "m" / "serving.yaml").write_text("golden_seconds: 0\nshadow: {rate: 1.0, max_per_second: 1000}\n")
    return root


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens").write_text(f"{MANAGE} manage,read,infer\n")
    (tmp_path / "tokens").chmod(0o600)
    return tmp_path / "tokens"


def program(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def ask(server: ServerProcess, times: int = 1, **headers: str) -> None:
    x = np.random.default_rng(times).standard_normal((2, 64)).astype(np.float32)
    x[:, 0] = SECRET
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    with triton.InferenceServerClient(server.target) as client:
        for _ in range(times):
            client.infer("m", [tensor], headers=headers)


@pytest.mark.long
def test_evidence_separates_damage_in_memory_from_drift_of_the_model(
    repository: Path, tmp_path: Path, serve: Serve
) -> None:
    server = serve("--repository", str(repository), "--evidence").wait_ready()
    out, where = tmp_path / "breach", f"http://127.0.0.1:{server.ports()[1]}"
    fetch = ("evidence", "m", "--server", where, "--out", out)
    asked = program("bf16-serve", *fetch)
    assert (asked.returncode, asked.stderr.count("\n")) == (1, 1)
    assert "no live sample has been measured" in asked.stderr
    ask(server)
    until(lambda: server.metric('bf16kit_drift_samples_total{model="m",outcome="measured",version="1"}') > 0, 60)
    asked = program("bf16-serve", *fetch)
    assert (asked.returncode, "has not been over its budget" in asked.stderr) == (1, True), asked.stderr

    faults.flip(server.process.pid, faults.stored(repository / "m" / "1", "a"))

    def over() -> bool:
        ask(server, 8)
        return server.metric(OVER) == 1

    until(over, 60, "a breach")
    asked = program("bf16-serve", *fetch)
    assert asked.returncode == 0, asked.stderr
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    evidence = Evidence.read(out)
    assert (evidence.header.rows, evidence.header.of_rows, evidence.header.profile) == (1, 2, "cpu")
    assert evidence.feeds["x"][0, 0] == np.float32(SECRET)
    assert "sending the evidence of its last breach" in server.log
    assert str(SECRET) not in server.log + asked.stdout, "what clients send is in no log"

    told = program("bf16-convert", "explain", out, "--artifact", repository / "m" / "1")
    assert told.returncode == 0, told.stderr
    assert "The artifact does not give what was served" in told.stdout
    assert "second" in told.stdout, "the artifact's own layers follow"
    server.terminate()
    assert server.exit_code() == 0


@pytest.mark.long  # a server of several processes
def test_workers_give_evidence_to_a_manage_token_and_explain_names_the_layer(
    tmp_path: Path, tokens: Path, serve: Serve
) -> None:
    """The model itself is over its drift budget, because of cancellation."""
    repository = tmp_path / "models"
    onnx.save(cancellation().proto, tmp_path / "m.onnx")
    options = ("--format", "onnx", "--allow-over-budget", "--no-search")
    converted = program("bf16-convert", "checkpoint", tmp_path / "m.onnx", "--out", repository / "m" / "1", *options)
    assert converted.returncode == 0, converted.stderr
    _without_golden(repository / "m" / "1")
    (repository / "m" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 1000}\n")
    flags = ("--workers", "2", "--evidence", "--token-file", str(tokens))
    server = serve("--repository", str(repository), *flags)
    until(lambda: server.get("/readyz")[0] == 200, 60, "ready")
    out, where = tmp_path / "breach", f"http://127.0.0.1:{server.ports()[1]}"

    def fetched() -> bool:
        ask(server, 8, authorization=f"Bearer {MANAGE}")
        asked = program("bf16-serve", "evidence", "m", "--server", where, "--token-file", tokens, "--out", out)
        return asked.returncode == 0

    until(fetched, 60, "evidence of a breach")
    asked = program("bf16-serve", "evidence", "m", "--server", where, "--out", tmp_path / "other")
    assert (asked.returncode, "needs a token" in asked.stderr) == (1, True)
    told = program("bf16-convert", "explain", out, "--artifact", repository / "m" / "1", "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["again"][0]["reproduced"] is True
    assert found["profiles"][0]["leaves"]["name"] == "difference"


@pytest.mark.long
def test_a_server_without_evidence_rejects_the_command(repository: Path, tmp_path: Path, serve: Serve) -> None:
    server = serve("--repository", str(repository)).wait_ready()
    where = f"http://127.0.0.1:{server.ports()[1]}"
    asked = program("bf16-serve", "evidence", "m", "--server", where, "--out", tmp_path / "breach")
    assert asked.returncode == 1
    assert "evidence is off: start the server with --evidence" in asked.stderr
    assert not (tmp_path / "breach").exists()


def _without_golden(artifact: Path) -> None:
    """Remove the golden samples: they would fail when the model is loaded, and it would not become ready."""
    opened = Artifact.open(artifact)
    files = {name: entry for name, entry in opened.manifest.files.items() if name != "golden.safetensors"}
    changed = opened.manifest.model_copy(update={"golden": None, "files": files})
    (artifact / "manifest.json").write_bytes(changed.dumps())
