"""Publishes the demo's model in a repository: converts all-MiniLM-L6-v2 and writes its serving.yaml.

The one-shot service of ``compose.yaml`` runs ``python publish.py REPOSITORY``; ``make demo`` calls :func:`publish`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import minilm

from bf16kit.messages.wording import os_error_text
from bf16kit.system import controlgroup
from bf16kit.system.controlgroup import Memory

HERE = Path(__file__).parent
MODEL = "minilm"


class PublishFailed(Exception):
    """``bf16-convert`` ended with a nonzero exit code (its message is above), or a file cannot be written."""


def publish(repository: Path) -> Path:
    """Convert with real sentences as calibration samples, replacing any existing artifact; return its directory."""
    target = repository / MODEL / "1"
    command = [program_path("bf16-convert"), "checkpoint", str(minilm.checkpoint()), "--out", str(target), "--force"]
    # The converter imports `minilm:calibration` from this directory.
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run([*command, "--samples", "minilm:calibration"], env=environment, check=False)
    if result.returncode != 0:
        raise PublishFailed(exit_reason(result.returncode))
    write_serving_yaml(target.parent)
    return target


def write_serving_yaml(model: Path) -> None:
    """Write ``serving.yaml`` of ``model`` atomically; :func:`main` takes it as a sign that everything is there."""
    temporary, final = model / ".serving.yaml.part", model / "serving.yaml"
    try:
        temporary.write_bytes((HERE / "serving.yaml").read_bytes())
        temporary.replace(final)
    except OSError as error:
        raise PublishFailed(f"{final} cannot be written: {os_error_text(error)}") from None


def exit_reason(code: int, memory: Callable[[], Memory | None] = controlgroup.memory) -> str:
    """Explain a conversion that ended with ``code``; one that the system killed could not print a message."""
    if code != -signal.SIGKILL:
        return f"bf16-convert ended with exit code {code}; its message is above"
    found, killed = memory(), "bf16-convert was killed, as the system does when memory runs out"
    if found is None:
        return killed
    limit = f"{found.limit / 1e6:.0f} MB"
    return f"{killed}: this container may take {limit}; give it more (CONVERT_MEMORY=4g docker compose up)"


def program_path(name: str) -> str:
    """Return the path of a command in the environment that runs this file, even if it is not on PATH."""
    return str(Path(sys.executable).with_name(name))


def main(repository: Path) -> int:
    """Publish unless the repository already holds the model, so that starting again is quick."""
    try:
        if (repository / MODEL / "serving.yaml").exists():  # written last
            print(f"{repository / MODEL} already exists; remove the volume to convert again")
            return 0
        publish(repository)
    except PermissionError as failure:
        remedy = f"let that user write to {repository}, or run as another (docker run --user)"
        print(f"publish failed: {failure.filename}: {os_error_text(failure)}; {remedy}", file=sys.stderr)
        return 1
    except (PublishFailed, FileNotFoundError) as failure:
        print(f"publish failed: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python publish.py REPOSITORY")
    # Process 1 of a container ignores signals without a handler: `docker compose stop` would wait, and then kill it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(Path(sys.argv[1])))
