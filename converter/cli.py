"""``bf16-convert``: its commands, its exit codes, and how an error becomes a message."""

from __future__ import annotations

import gc
import io
import sys
import traceback

import click

from bf16kit import __version__
from bf16kit.converter.commands.artifacts import explain, inspect, restore, verify
from bf16kit.converter.commands.checkpoint import checkpoint
from bf16kit.converter.commands.doctor import doctor
from bf16kit.converter.commands.recover import recover
from bf16kit.messages import errors
from bf16kit.messages.commandline import HintingGroup
from bf16kit.messages.wording import printable, without_long_words

DONE = 0
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# The one table from errors to exit codes; the first class that matches decides.
EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.BudgetExceeded, 1),
    (errors.UsageError, 2),
    (errors.RequestError, 2),
    (errors.Bf16kitError, 3),  # a model that cannot be converted or does not run
    (OSError, 2),  # a file of the user's disappeared, or the disk failed
)
BUG = 3


def main() -> None:
    """The entry point: run the command, report an error in one message, exit with the code from the table."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show × or – is no reason to fail
        sys.stdout.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    gc.freeze()  # without it the interpreter visits torch's objects once more at exit, which takes 1.6 s
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run ``bf16-convert`` with ``arguments`` and return its exit code."""
    debug = "--debug" in arguments
    try:
        code = command(args=arguments, prog_name="bf16-convert", standalone_mode=False)
    except click.exceptions.Exit as stop:  # --help and --version
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as stop:
        if isinstance(stop.__cause__, EOFError):  # click takes it for the end of standard input, which is not read
            return _failed(stop.__cause__, debug=debug)
        click.echo("bf16-convert: interrupted; nothing was published", err=True)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost: whatever it is becomes a message and an exit code
        return _failed(error, debug=debug)
    return code if isinstance(code, int) else DONE  # for several checkpoints, the worst code


def _failed(error: Exception, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    click.echo(f"bf16-convert: error: {printable(without_long_words(_message(error)))}", err=True)
    return exit_code(error)


def exit_code(error: BaseException) -> int:
    """Return the exit code of ``error`` by :data:`EXIT_CODES`; an error of any other class is a bug."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), BUG)


def _message(error: Exception) -> str:
    if isinstance(error, errors.Bf16kitError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return (
        f"unexpected {type(error).__name__}: {error}; this is a bug in bf16-convert:"
        " run it again with --debug and report what it prints"
    )


class _Commands(HintingGroup):
    hint = "To convert: bf16-convert checkpoint SOURCE --out REPOSITORY/MODEL/1"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def command() -> None:
    """Turn fp32 checkpoints into bf16 artifacts, and prove what that cost in accuracy.

    Exit codes: 0 done; 1 drift over budget, nothing published; 2 wrong usage or unreadable input; 3 a model that cannot
    be converted.
    """


for _each in (checkpoint, inspect, verify, explain, recover, restore, doctor):
    command.add_command(_each)


if __name__ == "__main__":
    main()
