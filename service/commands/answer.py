"""How a command answers: text or JSON on the standard output, one line on the standard error, an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

FAILED = 1
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells say it

as_json = click.option("--json", "as_json", is_flag=True, help="Write JSON for programs: docs/json.md says what.")
repository = click.option("--repository", metavar="DIRECTORY", help="Directory of <model>/<version>/ artifacts.")
config_file = click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    envvar="BF16KIT_CONFIG",
    help="server.yaml, for what is not given as a flag.",
)


def say(text: str) -> None:
    """One or more lines on the standard output; control characters in names that strangers chose are written out."""
    from bf16kit.text import printable

    click.echo(printable(text))


def say_json(value: Any) -> None:
    """One JSON object on the standard output."""
    from bf16kit.document import dumps

    click.echo(dumps(value))


def end(command: str, reason: str, code: int) -> NoReturn:
    """One line on the standard error, and the end."""
    from bf16kit.text import printable

    click.echo(f"bf16-serve {command}: {printable(reason, keep='')}", err=True)
    sys.exit(code)


@contextmanager
def expected(command: str) -> Iterator[None]:
    """Ends with a line and exit code 2 for wrong usage, 1 for every other error that is expected, 130 for Ctrl-C."""
    from bf16kit.errors import Bf16kitError, RequestError, UsageError

    try:
        yield
    except (UsageError, RequestError) as error:
        end(command, str(error), USAGE)
    except Bf16kitError as error:
        end(command, str(error), FAILED)
    except KeyboardInterrupt:
        end(command, "interrupted", INTERRUPTED)
