"""A group of commands that says how its program is used when it gets an argument that is none of them."""

from __future__ import annotations

import click


class HintingGroup(click.Group):
    """Adds ``hint``, a sentence, to the error for an unknown command."""

    hint = ""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(context, args)
        except click.UsageError as error:
            raise click.UsageError(f"{error.format_message()} {self.hint}", context) from None
