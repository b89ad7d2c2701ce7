"""What the one-shot service of compose.yaml says of a conversion that failed, and how it ends when it is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import publish
import pytest
from othersfiles import closed, open_place
from publish import main, why
from waiting import until

from bf16kit.controlgroup import Memory


def test_a_conversion_that_the_system_ended_is_told_with_the_containers_memory() -> None:
    narrow = Memory(limit=300 << 20, left=0, ended=1)
    assert why(-signal.SIGKILL, lambda: narrow) == (
        "bf16-convert was killed, as the system does when memory runs out: this container may take 315 MB; give it more"
        " (CONVERT_MEMORY=4g docker compose up)"
    )
    assert why(-signal.SIGKILL, lambda: None) == "bf16-convert was killed, as the system does when memory runs out"


def test_one_that_said_why_itself_is_left_to_say_it() -> None:
    assert why(1, lambda: None) == "bf16-convert ended with exit code 1; its message is above"


def test_a_volume_that_is_full_holds_no_half_of_what_says_that_all_is_there(tmp_path: Path) -> None:
    """No file may have more than ten bytes, and serving.yaml has more."""
    code = "import pathlib, publish, sys; publish.serve_as_the_demo(pathlib.Path(sys.argv[1]))"
    command = ["prlimit", "--fsize=10", sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=publish.HERE, capture_output=True, text=True, check=False)
    assert f"PublishFailed: {tmp_path}/serving.yaml cannot be written: File too large" in done.stderr
    assert not (tmp_path / "serving.yaml").exists()
    publish.serve_as_the_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["serving.yaml"]


@pytest.mark.long  # a conversion at work takes some seconds
def test_a_conversion_that_is_stopped_takes_its_converter_with_it_and_publishes_nothing(tmp_path: Path) -> None:
    """As `docker compose stop` and kubelet do it."""
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


def test_a_volume_of_another_user_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with open_place() as place, closed(place) as user:
        assert main(place) == 1
    said = capsys.readouterr().err
    assert said == (
        f"publish failed: {place / 'minilm' / 'serving.yaml'}: Permission denied to user {user}; let that user write to"
        f" {place}, or run as another (docker run --user)\n"
    )
