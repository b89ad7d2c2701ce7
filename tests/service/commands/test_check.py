"""``bf16-serve check``: the server's own code finds out whether the server would serve."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from artifacts import write_mlp
from commanded import Run, one_line, read
from sessions import recorded_sessions
from tlsfiles import Authority
from waiting import until

CPU = ("--device", "cpu")


def failed(result: dict[str, object]) -> dict[str, str]:
    findings = result["findings"]
    assert isinstance(findings, list)
    texts = {each["subject"]: each["text"] for each in findings if each["outcome"] == "failed"}
    assert not [text for text in texts.values() if text.startswith("unexpected")]  # the text of a bug begins so
    return texts


@pytest.mark.long
def test_a_process_checks_everything_that_a_server_needs_and_exits_with_0(repository: Path, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"repository: {repository}\ndevice: cpu\n")
    command = [sys.executable, "-m", "bf16kit.service", "check", "--config", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert [each["subject"] for each in found["findings"]] == [
        *("configuration", "CPU kernel", "TLS", "tokens", "shared memory", "traces", "repository"),
        "model 'mlp' version 2",
    ]
    assert "golden samples within budget" in found["findings"][-1]["text"]


def test_a_version_that_fails_is_an_error_a_note_names_the_one_that_would_serve_and_other_models_are_still_checked(
    repository: Path, run: Run
) -> None:
    shutil.rmtree(repository / "mlp" / "2")
    write_mlp(repository / "mlp" / "2", spoil=0.5)
    write_mlp(repository / "good" / "1")
    asked = ("check", "--repository", repository, *CPU)
    for policy, notes in (("{latest: 1}", 1), ("{latest: 1, strict: true}", 0)):
        (repository / "mlp" / "serving.yaml").write_text(f"version_policy: {policy}\n")
        result = run(*asked)
        assert result.exit_code == 1
        assert "failed  model 'mlp' version 2: golden samples are over the drift budget" in result.stdout
        assert result.stdout.count("note    model 'mlp': a server that starts would try version 1 instead") == notes
        assert "ok      model 'good' version 1: " in result.stdout
    assert run(*asked, "--no-load").exit_code == 0  # without a run the drift is not known
    result = run(*asked, "good")
    assert result.exit_code == 0
    assert "configuration: flags: 2; variables of the environment: 0; no server.yaml" in result.stdout


def test_options_and_environment_are_checked(repository: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a usable configuration nothing is checked, and the exit code is the server's."""
    refused = run("check", "--repository", repository, "--workers", "-1", "--json")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "bf16-serve check: configuration: 'workers' is -1" in refused.stderr
    monkeypatch.setenv("BF16KIT_KERNEL_PATH", "fast")
    monkeypatch.setenv("BF16KIT_MAX_IN_FLIHT", "9")
    result = run("check", "--repository", repository, *CPU, "--no-load")
    assert result.exit_code == 1
    assert "failed  CPU kernel: BF16KIT_KERNEL_PATH is 'fast'" in result.stdout
    assert "note    environment: unknown environment variables are ignored: 'BF16KIT_MAX_IN_FLIHT'" in result.stdout
    monkeypatch.setenv("BF16KIT_MAX_IN_FLIGHT", "0")
    refused = run("check", "--repository", repository)
    assert "BF16KIT_MAX_IN_FLIGHT in the environment: 'max_in_flight' is '0'" in refused.stderr


def test_tls_and_token_files_are_read_and_an_expired_one_fails(repository: Path, run: Run, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.sign("server"), authority.sign("other")
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-that-is-long-enough infer\n")
    tokens.chmod(0o600)
    files = ("--token-file", tokens, "--tls-certificate", pair.certificate, "--tls-key")
    checked = ("check", "--repository", repository, *CPU, "--no-load", "--json")
    asked = (*checked, *files)
    result = run(*asked, pair.key)
    assert result.exit_code == 0, result.stdout
    told = {each["subject"]: each["text"] for each in read(result)["findings"]}
    assert (str(tokens) in told["tokens"], told["traces"]) == (True, "off")
    assert "cannot be used" in failed(read(run(*asked, other.key)))["TLS"]
    tokens.write_text("short infer\n")
    assert "line 1: the token has 5 characters" in failed(read(run(*asked, pair.key)))["tokens"]

    def tls(days: int, *more: object) -> dict[str, str]:
        pair = authority.sign(f"days{days}", days=days)
        files = ("--tls-certificate", pair.certificate, "--tls-key", pair.key)
        findings = read(run(*checked, *files, *more))["findings"]
        return {each["outcome"]: each["text"] for each in findings if each["subject"] == "TLS"}

    assert "is valid until" in tls(2)["ok"]
    assert "clients show certificates" in tls(3, "--tls-client-ca", authority.certificate)["ok"]
    until(lambda: "certificate has expired" in tls(0).get("failed", ""), 20, "the end of a certificate of no days")


def test_without_loading_damaged_files_unknown_keys_and_directories_that_are_skipped_are_found(
    repository: Path, run: Run
) -> None:
    weights = repository / "mlp" / "2" / "weights.bf16"
    content = bytearray(weights.read_bytes())
    content[5] ^= 1
    weights.write_bytes(content)
    (repository / "lost+found").mkdir()
    found = read(run("check", "--repository", repository, *CPU, "--no-load", "--json"))
    assert "its sha256 is" in failed(found)["model 'mlp' version 2"]
    assert "model 'lost+found'" in [each["subject"] for each in found["findings"] if each["outcome"] == "note"]
    (repository / "mlp" / "serving.yaml").write_text("max_batch: 8\n")
    found = read(run("check", "--repository", repository, *CPU, "--json"))
    assert "unknown key 'max_batch'" in failed(found)["model 'mlp' version 2"]


def test_an_empty_repository_fails_unless_clients_load_the_models(tmp_path: Path, run: Run) -> None:
    """A server that clients cannot load models into would never be ready."""
    asked = ("check", "--repository", tmp_path, *CPU)
    result = run(*asked)
    assert result.exit_code == 1
    assert "failed  repository:" in result.stdout
    assert " checks failed: this server would not serve everything" in result.stdout.splitlines()[-1]
    explicit = (*asked, "--model-control", "explicit")
    assert run(*explicit).exit_code == 0
    result = run(*explicit, "--load-model", "nope", "--json")
    assert failed(read(result)) == {"repository": "load_model: the repository has no model 'nope'; its models are none"}


def test_wrong_usage_is_one_line_and_exit_code_2(repository: Path, run: Run) -> None:
    result = run("check", "--repository", repository, *CPU, "--no-load", "nope")
    assert result.exit_code == 2
    assert "the repository has no model 'nope'; it has mlp" in one_line(result)
    result = run("--repository", repository, "check")
    assert result.exit_code == 2
    assert "--repository is given before the command; put it after check" in result.stderr


def test_all_versions_of_all_models_are_checked_in_one_run_and_each_is_freed_before_the_next_is_loaded(
    repository: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(repository / "mlp", repository / "b")
    (repository / "mlp" / "serving.yaml").write_text("version_policy: all\n")
    in_memory: list[int] = []  # sessions of earlier models when each is opened
    opened = recorded_sessions(monkeypatch, lambda: in_memory.append(opened()))
    result = run("check", "--repository", repository, *CPU)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("golden samples within budget") == 3
    assert "ok      model 'mlp' version 1: onnxruntime on cpu" in result.stdout
    assert result.stdout.splitlines()[-1] == "all checks passed"
    assert len(in_memory) >= 3
    assert set(in_memory) <= {0, 1}, "a model's own session is open while the probe of its accumulation runs"
