"""An operator fetches the evidence of a breach from a real server's memory, and the converter explains it."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import faults
import numpy as np
import onnx
import pytest
from failing import cancellation
from serverprocess import Serve, ServerProcess
from waiting import until

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.evidence import Evidence
from bf16kit.runtime.ort import kernel

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not kernel.configured_kernel().path, reason="weights that are read as stored need the CPU kernel"
    ),
]
MANAGE = "manager-0123456789abcdef"
SECRET = 1234.5  # a client's value, in every row


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    faults.write_pair(root / "m" / "1")
    (root / "m" / "serving.yaml").write_text("golden_seconds: 0\nshadow: {rate: 1.0, max_per_second: 1000}\n")
    return root


def program(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def fetch(server: ServerProcess, out: Path, *more: object) -> subprocess.CompletedProcess[str]:
    where = f"http://127.0.0.1:{server.ports()[1]}"
    return program("bf16-serve", "evidence", "m", "--server", where, "--out", out, *more)


def ask(server: ServerProcess, times: int = 1, **headers: str) -> None:
    x = np.random.default_rng(times).standard_normal((2, 64)).astype(np.float32)
    x[:, 0] = SECRET
    for _ in range(times):
        server.infer("m", {"x": x}, headers=headers)


def test_evidence_separates_damage_in_memory_from_drift_of_the_model(
    repository: Path, tmp_path: Path, serve: Serve
) -> None:
    server = serve("--repository", repository, "--evidence").wait_ready()
    out = tmp_path / "breach"
    asked = fetch(server, out)
    assert (asked.returncode, asked.stderr.count("\n")) == (1, 1)
    assert "no live sample has been measured" in asked.stderr
    ask(server)
    until(lambda: server.of_model("drift_samples_total", "m", outcome="measured") > 0, 60)
    asked = fetch(server, out)
    assert (asked.returncode, "has not been over its budget" in asked.stderr) == (1, True), asked.stderr

    faults.flip(server.process.pid, faults.stored(repository / "m" / "1", "a"))

    def over() -> bool:
        ask(server, 8)
        return server.of_model("drift_over_budget", "m") == 1

    until(over, 60, "a breach")
    asked = fetch(server, out)
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


def test_workers_give_evidence_to_a_manage_token_and_explain_names_the_layer(tmp_path: Path, serve: Serve) -> None:
    """The model itself is over its drift budget, because of cancellation."""
    repository, tokens = tmp_path / "models", tmp_path / "tokens"
    tokens.write_text(f"{MANAGE} manage,read,infer\n")
    tokens.chmod(0o600)
    onnx.save(cancellation().proto, tmp_path / "m.onnx")
    options = ("--format", "onnx", "--allow-over-budget", "--no-search")
    converted = program("bf16-convert", "checkpoint", tmp_path / "m.onnx", "--out", repository / "m" / "1", *options)
    assert converted.returncode == 0, converted.stderr
    _without_golden(repository / "m" / "1")
    (repository / "m" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 1000}\n")
    flags = ("--workers", "2", "--evidence", "--token-file", tokens)
    server = serve("--repository", repository, *flags)
    until(lambda: server.get("/readyz")[0] == 200, 60, "ready")
    out = tmp_path / "breach"

    def fetched() -> bool:
        ask(server, 8, authorization=f"Bearer {MANAGE}")
        return fetch(server, out, "--token-file", tokens).returncode == 0

    until(fetched, 60, "evidence of a breach")
    asked = fetch(server, tmp_path / "other")
    assert (asked.returncode, "a token is needed" in asked.stderr) == (1, True)
    told = program("bf16-convert", "explain", out, "--artifact", repository / "m" / "1", "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["again"][0]["reproduced"] is True
    assert found["profiles"][0]["leaves"]["name"] == "difference"


def _without_golden(artifact: Path) -> None:
    """Remove the golden samples: they would fail when the model is loaded, and it would not become ready."""
    opened = Artifact.open(artifact)
    files = {name: entry for name, entry in opened.manifest.files.items() if name != "golden.safetensors"}
    changed = opened.manifest.model_copy(update={"golden": None, "files": files})
    (artifact / "manifest.json").write_bytes(changed.dumps())
