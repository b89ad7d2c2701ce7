"""``python -m bf16kit`` passes on to the two programs."""

import subprocess
import sys

import pytest

import bf16kit


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("--version", 0, f"bf16kit, version {bf16kit.__version__}\n"),
        ("convert --version", 0, f"bf16-convert, version {bf16kit.__version__}\n"),
        ("serve --version", 0, f"bf16-serve, version {bf16kit.__version__}\n"),
        ("serve check --repository nowhere", 2, "repository 'nowhere'"),
        ("convert inspect nowhere", 2, "bf16-convert: error: nowhere"),
        ("", 0, "Usage: python -m bf16kit convert"),
        ("train", 2, "there is no program 'train'"),
    ],
)
def test_it_runs_the_program_that_the_first_argument_names(arguments: str, code: int, said: str) -> None:
    command = [sys.executable, "-m", "bf16kit", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said in done.stdout + done.stderr
    assert done.returncode == code
