"""The command line of the conformance suite: its arguments, output and exit codes."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import grpc
import pytest
from oipserver import oip_server
from twists import put, refusing

from oip_conformance.cli import main
from oip_conformance.models import InputSetting, UsageError, parse_input

ECHO = ("--model", "echo", "--check", "server.*", "--check", "infer.id")


@pytest.fixture
def right() -> Iterator[str]:
    with oip_server() as address:
        yield address


@pytest.fixture
def wrong() -> Iterator[str]:
    with oip_server(put("ServerLive", live=False)) as address:
        yield address


def test_a_server_that_conforms_gives_exit_code_0(right: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([right, *ECHO]) == 0
    assert "8 passed, 0 failed" in capsys.readouterr().out


def test_a_broken_rule_gives_exit_code_1_and_prints_sent_expected_and_received(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([wrong, *ECHO, "--check", "server.live"]) == 1
    said = capsys.readouterr().out
    for words in ("FAIL  server.live  [MUST]", "sent      ServerLive", "expected  live: true", "came      OK: (empty)"):
        assert words in said
    assert "1 MUST, 1 TRITON" in said  # the second: ServerLive must also succeed after bytes that are not a message


def test_a_failed_should_rule_is_reported_but_gives_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    with oip_server(refusing("Check", lambda request: request.service)) as address:
        assert main([address, "--check", "health.service"]) == 0
    assert "told  health.service  [SHOULD]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say which server"),
        (["{}", "--model", "nobody"], "no metadata of nobody"),
        (["{}", "--check", "no.such.check"], "no check has such an id"),
        (["{}", "--input", "x_FP32"], "expected NAME=SHAPE"),
        (["{}", "--model", "echo", "--input", "x_FP32=1,5"], "say what one wants with --input"),
        (["--compare", "A="], "expected NAME=FILE.json"),
        (["{}", "--junit", "/no/such/directory/file", *ECHO], "/no/such/directory/file"),
    ],
)
def test_wrong_arguments_give_exit_code_2(
    right: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(right) for argument in arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_missing_server_gives_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main([address, "--patience", "0.2"]) == 2
    assert f"no gRPC server answers at {address}" in capsys.readouterr().err


def test_a_server_with_tls_is_tested_over_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(key)]
    named = ["-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", *new_key, *named], check=True, capture_output=True)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    with oip_server(tls=credentials) as address:
        assert main([address, *ECHO, "--tls", str(certificate)]) == 0
        assert main([address, *ECHO, "--patience", "0.5"]) == 2
    assert "no gRPC server answers" in capsys.readouterr().err


def test_junit_has_a_case_for_each_check(wrong: str, tmp_path: Path) -> None:
    main([wrong, "--model", "echo", "--check", "server.*", "--check", "health.*", "--junit", str(tmp_path / "out.xml")])
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert int(suite.get("tests", "")) == len(suite.findall("testcase")) == 11
    # the second failure: ServerLive must also succeed after bytes that are not a message
    failed = {f"{case.get('classname')}.{case.get('name')}" for case in suite if case.find("failure") is not None}
    assert failed == {"server.live", "server.garbage"}
    assert int(suite.get("failures", "")) == 2


def test_the_table_has_a_row_for_each_check(right: str, tmp_path: Path) -> None:
    main([right, *ECHO, "--table", str(tmp_path / "out.md")])
    rows = [line for line in (tmp_path / "out.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == 8
    assert rows[0].startswith("| `server.live` | MUST | pass |")


def test_compare_puts_runs_side_by_side(
    right: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, address in (("right", right), ("wrong", wrong)):
        main([address, *ECHO, "--json"])
        (tmp_path / name).write_text(capsys.readouterr().out)
    assert main(["--compare", f"A={tmp_path / 'right'}", f"B={tmp_path / 'wrong'}"]) == 0
    said = capsys.readouterr().out
    assert "| A | 8 | 0 | 0 | 0 | 0 |" in said
    assert "| MUST | ✓ | **✗** |" in said


def test_compare_merges_runs_of_one_server_and_prefers_tested_results(
    right: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, more in (("first", ()), ("second", ("--dangerous",))):
        main([right, "--check", "danger.classes-of-strings", "--json", *more])
        (tmp_path / name).write_text(capsys.readouterr().out)
    for order in (("first", "second"), ("second", "first")):
        assert main(["--compare", "A=" + ",".join(str(tmp_path / name) for name in order)]) == 0
        assert "| A | 1 | 0 | 0 | 0 | 0 |" in capsys.readouterr().out


def test_compare_shows_the_checks_of_all_runs_and_rejects_other_files(
    right: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for check in ("server.live", "server.ready"):
        main([right, "--check", check, "--json"])
        (tmp_path / check).write_text(capsys.readouterr().out)
    assert main(["--compare", f"A={tmp_path / 'server.live'}", f"B={tmp_path / 'server.ready'}"]) == 0
    said = capsys.readouterr().out
    assert "| MUST | ✓ | – |" in said
    assert "| MUST | – | ✓ |" in said
    (tmp_path / "other").write_text("no JSON")
    assert main(["--compare", f"A={tmp_path / 'other'}"]) == 2
    assert "is not a file from --json" in capsys.readouterr().err


def test_an_extension_that_is_not_declared_is_skipped_unless_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    def nothing(rpc: str, request: object, proceed: object) -> object:
        answer = proceed(request)  # type: ignore[operator]
        if rpc == "ServerMetadata":
            del answer.extensions[:]
        return answer

    with oip_server(nothing) as address:
        for more, outcome in (((), "skip"), (("--assume", "statistics"), "pass")):
            main([address, "--check", "statistics.success", "--json", *more])
            assert json.loads(capsys.readouterr().out)["checks"][0]["outcome"] == outcome


def test_an_input_is_described_by_its_shape_and_values() -> None:
    assert parse_input("ids=1,8/101,2023,102") == ("ids", InputSetting((1, 8), (101.0, 2023.0, 102.0)))
    assert parse_input("x=2,16") == ("x", InputSetting((2, 16)))
    name, said = parse_input("x=2/0..7")
    assert (name, said.values) == ("x", tuple(float(k) for k in range(8)))
    for bad in ("x", "x=a", "=1", "x=-1,2", "x=1/a..b"):
        with pytest.raises(UsageError):
            parse_input(bad)
