"""The output of a command: text or JSON on standard output, errors on standard error, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from bf16kit.messages.errors import Bf16kitError, RequestError, UsageError
from bf16kit.messages.wording import dumps, printable

FAILED = 1
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells say it

as_json = click.option("--json", "as_json", is_flag=True, help="Write JSON for programs, described in docs/json.md.")
repository = click.option("--repository", metavar="DIRECTORY", help="Directory of <model>/<version>/ artifacts.")
config_file = click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    envvar="BF16KIT_CONFIG",
    help="server.yaml, for settings that are not given as flags.",
)


def echo(text: str) -> None:
    """Write lines to standard output. Control characters, for example in a model's name, are escaped."""
    click.echo(printable(text))


def echo_json(value: Any) -> None:
    """Write one JSON object to standard output."""
    click.echo(dumps(value))


def fail(command: str, reason: str, code: int) -> NoReturn:
    """Write one line to standard error, and exit with ``code``."""
    click.echo(f"bf16-serve {command}: {printable(reason, keep='')}", err=True)
    sys.exit(code)


@contextmanager
def exit_on_errors(command: str) -> Iterator[None]:
    """Turn expected errors into one line and an exit code: 2 for wrong usage, 130 for Ctrl-C, 1 for all others."""
    try:
        yield
    except (UsageError, RequestError) as error:
        fail(command, str(error), USAGE)
    except Bf16kitError as error:
        fail(command, str(error), FAILED)
    except KeyboardInterrupt:
        fail(command, "interrupted", INTERRUPTED)
