"""The one-shot conversion service of compose.yaml: its messages if a conversion fails, its exit when stopped."""

import signal
import subprocess
import sys
from pathlib import Path

import publish
import pytest
from othersfiles import unreadable, world_readable_directory
from publish import exit_reason, main
from waiting import until

from bf16kit.system.controlgroup import Memory


def test_the_message_about_a_killed_conversion_has_the_containers_memory() -> None:
    narrow = Memory(limit=300 << 20, left=0, oom_kills=1)
    assert exit_reason(-signal.SIGKILL, lambda: narrow) == (
        "bf16-convert was killed, as the system does when memory runs out: this container may take 315 MB; give it more"
        " (CONVERT_MEMORY=4g docker compose up)"
    )
    assert (
        exit_reason(-signal.SIGKILL, lambda: None) == "bf16-convert was killed, as the system does when memory runs out"
    )


def test_a_failed_conversion_is_reported_with_its_exit_code_only() -> None:
    assert exit_reason(1, lambda: None) == "bf16-convert ended with exit code 1; its message is above"


def test_a_full_volume_gets_no_partial_serving_yaml(tmp_path: Path) -> None:
    """The limit is ten bytes per file, and serving.yaml has more."""
    code = "import pathlib, publish, sys; publish.write_serving_yaml(pathlib.Path(sys.argv[1]))"
    command = ["prlimit", "--fsize=10", sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=publish.HERE, capture_output=True, text=True, check=False)
    assert f"PublishFailed: {tmp_path}/serving.yaml cannot be written: File too large" in done.stderr
    assert not (tmp_path / "serving.yaml").exists()
    publish.write_serving_yaml(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["serving.yaml"]


@pytest.mark.long  # a conversion takes some seconds
def test_stopping_the_service_ends_its_converter_and_publishes_nothing(tmp_path: Path) -> None:
    """The test sends SIGTERM, as `docker compose stop` and kubelet do."""
    command = [sys.executable, str(publish.HERE / "publish.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        try:
            children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
            until(lambda: any((tmp_path / "minilm").glob("*")), 60, "a conversion at work")
            (converter,) = children.read_text().split()
            started.send_signal(signal.SIGTERM)
            assert started.wait(30) == 128 + signal.SIGTERM
        finally:
            started.kill()
    assert not Path(f"/proc/{converter}").exists()
    assert not (tmp_path / "minilm" / "serving.yaml").exists()


def test_a_volume_of_another_user_is_reported_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with world_readable_directory() as place, unreadable(place) as user:
        assert main(place) == 1
    said = capsys.readouterr().err
    assert said == (
        f"publish failed: {place / 'minilm' / 'serving.yaml'}: Permission denied to user {user}; let that user write to"
        f" {place}, or run as another (docker run --user)\n"
    )
