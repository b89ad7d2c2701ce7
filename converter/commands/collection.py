"""``bf16-convert checkpoint DIRECTORY --out REPOSITORY``: converts many checkpoints, with shared or own options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from bf16kit.messages.errors import UsageError
from converter.commands import echo

if TYPE_CHECKING:
    from converter.bulk.conversions import Conversion

_OWN = frozenset(("out", "force", "jobs", "per_model", "ray"))  # options of the collection, not of a model
_NAMING = ("map", "model", "samples")  # options whose value may name a file
_ENDING = re.compile(r"(\.safetensors\.index)?\.[^.]*$")

Check = Callable[[Sequence[str]], None]


def convert_collection(context: click.Context, source: Path, repository: Path, check: Check) -> int:
    """Convert the checkpoints in ``source``, print a summary, and return the largest exit code.

    Before the first conversion ``check`` is called with each command line, and raises :class:`UsageError` if one is
    wrong; so do names that no model can have, and a Ray cluster that does not answer.
    """
    from converter.bulk.conversions import Run, checkpoints, convert_all, run_here, summary

    found, skipped = checkpoints(source, repository)
    items = _items(context, found, repository, check)
    run: Run = run_here
    jobs, address = context.params["jobs"], context.params["ray"]
    if address is not None:
        if find_spec("ray") is None:
            raise UsageError("--ray needs Ray: pip install 'bf16kit[ray]'")
        from converter.bulk.onray import on_cluster

        run, jobs = on_cluster(address, jobs, _notify)
    _notify(f"{len(items)} checkpoint{'' if len(items) == 1 else 's'} in {source}")
    convert_all(items, repository, run, jobs=jobs or 1, force=context.params["force"], notify=_notify)
    echo("\n".join([summary(items), *(f"skipped: {reason}" for reason in skipped)]))
    return max(item.code for item in items)


def _notify(text: str) -> None:
    click.echo(f"bf16-convert: {text}", err=True)


def _items(
    context: click.Context, found: Mapping[Path, list[Path]], repository: Path, check: Check
) -> list[Conversion]:
    """Return what is to be converted: each checkpoint that was ``found``, with its model's name and its options."""
    from converter.bulk.conversions import Conversion, files_of
    from converter.options import parse_model_name

    own = _read_all(context.params["per_model"])
    known = [o for o in context.command.params if isinstance(o, click.Option) and o.name not in _OWN]
    options = {flag.removeprefix("--"): option for option in known for flag in option.opts}
    for_all = [o for o in known if context.get_parameter_source(str(o.name)) is ParameterSource.COMMANDLINE]
    given = {option: context.params[str(option.name)] for option in for_all}
    items: dict[str, Conversion] = {}
    for path, files in found.items():
        stem = _ENDING.sub("", path.name) if path.is_file() else path.name
        settings, fields = own.pop(path.name, None) or own.pop(stem, None) or (path.name, {})
        name = str(fields.pop("name", stem))
        parse_model_name(str(settings), name)
        if name in items:
            raise UsageError(
                f"{items[name].source} and {path} would both become model {name!r}; rename one, or pass --per-model"
                " DIRECTORY with a FILE.yaml for it that sets `name: …`"
            )
        for key in [key for key in fields if key not in options]:
            raise UsageError(f"{settings}: unknown option {key!r}; known: {', '.join(sorted([*options, 'name']))}")
        chosen = given | {options[key]: value for key, value in fields.items()}
        arguments = [text for option, value in chosen.items() for text in _arguments(option, value, settings)]
        named = [Path(str(value)) for option, value in chosen.items() if option.name in _NAMING and value]
        files = [*files, *(file for one in named if one.exists() for file in files_of(one))]
        items[name] = Conversion(name, path, arguments, files)
        try:
            check([str(path), "--out", str(repository / name / "1"), *arguments])
        except (UsageError, click.UsageError) as error:
            raise UsageError(f"{path.name}: {error}") from None
    for settings, _ in own.values():
        raise UsageError(f"{settings}: there is no checkpoint of that name; rename or remove the file")
    return [*items.values()]


def _read_all(directory: Path | None) -> dict[str, tuple[Path, dict[Any, Any]]]:
    """Return the options in each ``NAME.yaml`` of ``directory``, by NAME."""
    import yaml

    found = {}
    for path in sorted(directory.glob("*.yaml")) if directory is not None else ():
        try:
            fields = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None
        if not isinstance(fields, dict):
            raise UsageError(f"{path}: expected one option per line, such as `model: pkg.mod:factory`")
        found[path.stem] = path, fields
    return found


def _arguments(option: click.Option, value: Any, where: object) -> list[str]:
    """Return the part of a command line that sets ``option`` to the ``value`` of click or of the file ``where``."""
    flag = option.opts[0]
    if value is None:  # removes what was set for all models
        return []
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {flag.removeprefix('--')} is {value!r}, expected true or false")
        return [flag] if value else option.secondary_opts[:1]
    if isinstance(value, dict):  # a budget, or model-args
        value = [f"{name}={bound}" for name, bound in value.items()] if option.multiple else json.dumps(value)
    values = value if option.multiple and isinstance(value, list | tuple) else [value]
    return [text for each in values for text in (flag, str(each))]
