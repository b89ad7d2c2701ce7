"""``python -m bf16kit``: the two programs, where their own commands are not on PATH."""

from __future__ import annotations

import sys

import click

from bf16kit import __version__

_HELP = """Usage: python -m bf16kit convert …   the same as bf16-convert …
       python -m bf16kit serve …     the same as bf16-serve …
       python -m bf16kit --version"""
EXIT_USAGE = 2


def main() -> None:
    """Run the program that the first argument names with the other arguments."""
    name, *sys.argv[1:] = sys.argv[1:] or ["--help"]
    if name == "convert":
        from bf16kit.converter.cli import main as convert

        convert()
    elif name == "serve":
        from bf16kit.service.cli import main as serve

        serve(prog_name="bf16-serve")
    elif name == "--version":
        click.echo(f"bf16kit, version {__version__}")
    elif name in ("-h", "--help"):
        click.echo(_HELP)
    else:
        click.echo(f"bf16kit: there is no program {name!r}\n{_HELP}", err=True)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
