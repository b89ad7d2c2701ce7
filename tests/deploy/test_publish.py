"""What the one-shot service of compose.yaml says of a conversion that failed."""

from __future__ import annotations

import signal

from publish import why

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
