"""``bf16-convert checkpoint DIRECTORY --out REPOSITORY``: converts many checkpoints, with shared or own options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from bf16kit.converter.commands import echo
from bf16kit.converter.commands.checkpoint import options_of
from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import table, unknown_names
from bf16kit.messages.yamltext import read_mapping

if TYPE_CHECKING:
    from bf16kit.converter.bulk.conversions import Conversion

_OWN = frozenset(("out", "force", "jobs", "per_model", "ray"))  # options of the collection, not of a model
_NAMING = ("map", "model", "samples")  # options whose value may name a file
_ENDING = re.compile(r"(\.safetensors\.index)?\.[^.]*$")


def convert_collection(context: click.Context, source: Path, repository: Path) -> int:
    """Convert the checkpoints in ``source``, print a summary, and return the largest exit code.

    Raises :class:`UsageError` before the first conversion for wrong options, for names that no model can have, and if
    a Ray cluster does not answer.
    """
    from bf16kit.converter.bulk.conversions import Run, checkpoints, convert_all, run_here

    found, skipped = checkpoints(source, repository)
    items = _items(context, found, repository)
    run: Run = run_here

    def notify(text: str) -> None:
        click.echo(f"bf16-convert: {text}", err=True)

    jobs, address = context.params["jobs"], context.params["ray"]
    if address is not None:
        if find_spec("ray") is None:
            raise UsageError("--ray needs Ray: pip install 'bf16kit[ray]'")
        from bf16kit.converter.bulk.onray import on_cluster

        run, jobs = on_cluster(address, jobs, notify)
    notify(f"{len(items)} checkpoint{'' if len(items) == 1 else 's'} in {source}")
    convert_all(items, repository, run, jobs=jobs or 1, force=context.params["force"], notify=notify)
    title = f"{sum(item.code == 0 for item in items)} of {len(items)} checkpoints converted"
    rows = [(item.model, item.version, item.source.name, item.result) for item in items]
    results = table(title, ("model", "version", "source", "result"), rows)
    echo("\n".join([results, *(f"skipped: {reason}" for reason in skipped)]))
    return max(item.code for item in items)


def _items(context: click.Context, found: Mapping[Path, list[Path]], repository: Path) -> list[Conversion]:
    """Return what is to be converted: each checkpoint that was ``found``, with its model's name and its options."""
    from bf16kit.converter.bulk.conversions import Conversion, files_of
    from bf16kit.converter.options import parse_model_name

    directory = context.params["per_model"]
    own = {path.stem: path for path in sorted(directory.glob("*.yaml"))} if directory is not None else {}
    known = [o for o in context.command.params if isinstance(o, click.Option) and o.name not in _OWN]
    options = {flag.removeprefix("--"): option for option in known for flag in option.opts}
    for_all = [o for o in known if context.get_parameter_source(str(o.name)) is ParameterSource.COMMANDLINE]
    given = {option: context.params[str(option.name)] for option in for_all}
    items: dict[str, Conversion] = {}
    for path, files in found.items():
        stem = _ENDING.sub("", path.name) if path.is_file() else path.name
        settings = own.pop(path.name, None) or own.pop(stem, None)
        fields = read_mapping(settings) if settings is not None else {}
        name = parse_model_name(str(settings or path.name), str(fields.pop("name", stem)))
        if name in items:
            both = f"{items[name].source} and {path} would both become model {name!r}"
            raise UsageError(f"{both}; rename one, or set `name: …` in a FILE.yaml for it in --per-model DIRECTORY")
        if unknown := [key for key in fields if key not in options]:
            raise UsageError(f"{settings}: {unknown_names('option', unknown, [*options, 'name'])}")
        chosen = given | {options[key]: value for key, value in fields.items()}
        arguments = [text for option, value in chosen.items() for text in _arguments(option, value)]
        named = [Path(str(value)) for option, value in chosen.items() if option.name in _NAMING and value]
        files = [*files, *(file for one in named if one.exists() for file in files_of(one))]
        items[name] = Conversion(name, path, arguments, files)
        alone = [str(path), "--out", str(repository / name / "1"), *arguments]
        try:
            options_of(**context.command.make_context("checkpoint", alone).params)
        except (UsageError, click.UsageError) as error:
            raise UsageError(f"{path.name}: {error}") from None
    for settings in own.values():
        raise UsageError(f"{settings}: there is no checkpoint of that name; rename or remove the file")
    return [*items.values()]


def _arguments(option: click.Option, value: Any) -> list[str]:
    """Return the part of a command line that sets ``option`` to a ``value`` of click or YAML; None removes it."""
    flag = option.opts[0]
    if option.is_flag and isinstance(value, bool):
        return [flag] if value else option.secondary_opts[:1]
    if isinstance(value, dict):  # a budget, or model-args
        value = [f"{name}={bound}" for name, bound in value.items()] if option.multiple else json.dumps(value)
    values = value if option.multiple and isinstance(value, list | tuple) else [value]
    parts = ([f"{flag}={each}"] if option.is_flag else [flag, str(each)] for each in values if each is not None)
    return [text for part in parts for text in part]
