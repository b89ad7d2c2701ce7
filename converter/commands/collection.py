"""``bf16-convert checkpoint DIRECTORY --out REPOSITORY``: converts many checkpoints, with shared or own options."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from bf16kit.messages.errors import UsageError

if TYPE_CHECKING:
    from converter.bulk.executor import Executor

_LARGEST = 1 << 20  # bytes of a file of options
_OWN = frozenset(("out", "force", "jobs", "per_model", "ray"))  # options of the collection, not of a model
_NAMING = ("map", "model", "samples")  # options whose value may name a file
_NAME = "name"

Arguments = Mapping[str, Sequence[str]]  # parts of a command line, by the option they set


def convert_all(context: click.Context, source: Path, repository: Path, check: Callable[[Sequence[str]], None]) -> int:
    """Convert the checkpoints in ``source``, print a summary, and return the worst exit code.

    ``check`` is called with each command line before work begins, and raises :class:`UsageError` for a wrong one. Names
    that no model can have raise it too.
    """
    from converter.bulk.run import run, summary, worst_exit_code
    from converter.bulk.worklist import ModelSettings, collect
    from converter.options import parse_model_name, parse_target

    common = _common_arguments(context)
    per_model = context.params["per_model"]
    own_options = {} if per_model is None else _read_option_files(per_model)
    used: set[str] = set()

    def configure(file: str, model: str) -> ModelSettings:
        found = [name for name in (file, model) if name in own_options]
        used.update(found)
        fields = dict(own_options[found[0]]) if found else {}
        name = fields.pop(_NAME, model)
        if not isinstance(name, str):
            raise UsageError(f"{per_model}/{found[0]}.yaml: name is {name!r}, expected the model's name")
        parse_model_name(f"{per_model}/{found[0]}.yaml" if found else file, name)
        arguments = {**common, **_arguments(context, fields, f"{per_model}/{found[0] if found else ''}.yaml")}
        return ModelSettings(
            name, tuple(text for texts in arguments.values() for text in texts), _referenced_files(arguments)
        )

    worklist = collect(source, configure, repository)
    unused = sorted(own_options.keys() - used)
    if unused:
        raise UsageError(
            f"{per_model}/{unused[0]}.yaml: {source} has no checkpoint of that name; rename or remove the file"
        )
    for item in worklist.items:
        target = repository / item.model / "1"
        parse_target(target)
        try:
            check([str(item.source), "--out", str(target), *item.arguments])
        except (UsageError, click.UsageError) as error:
            raise UsageError(f"{item.source.name}: {error}") from None
    click.echo(
        f"bf16-convert: {len(worklist.items)} checkpoint{'' if len(worklist.items) == 1 else 's'} in {source}", err=True
    )
    with _executor(context.params["ray"], source, repository, context.params["jobs"], _notify) as (executor, jobs):
        outcomes, interrupted = run(
            worklist, repository, executor, jobs=jobs, force=context.params["force"], notify=_notify
        )
    from converter.commands.common import echo

    echo(summary(outcomes, worklist))
    return worst_exit_code(outcomes, interrupted=interrupted)


def _notify(text: str) -> None:
    click.echo(f"bf16-convert: {text}", err=True)


@contextmanager
def _executor(
    address: str | None, source: Path, repository: Path, jobs: int | None, notify: Callable[[str], None]
) -> Iterator[tuple[Executor, int]]:
    """Yield the executor of the conversions, and how many run at a time. Raises UsageError if Ray is not available."""
    if address is None:
        from converter.bulk.executor import LocalExecutor

        yield LocalExecutor(), jobs or 1
        return
    try:
        from converter.bulk.onray import RayExecutor
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ray":
            raise
        raise UsageError("--ray needs Ray: pip install 'bf16kit[ray]'") from None
    cluster = RayExecutor(address, source, repository, jobs, notify)
    try:
        yield cluster, cluster.jobs
    finally:
        cluster.close()


def _referenced_files(arguments: Arguments) -> tuple[Path, ...]:
    """Return the files and directories that options name; functions named instead are left out."""
    paths = (Path(arguments[name][-1]) for name in _NAMING if arguments.get(name))
    return tuple(path for path in paths if _exists(path))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # longer than any file name, or with a zero byte
        return False


def _common_arguments(context: click.Context) -> dict[str, list[str]]:
    """Return the options that the command line set for every model."""
    found: dict[str, list[str]] = {}
    for option in _options(context).values():
        name = option.name or ""
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            found[name] = _to_arguments(option, context.params[name])
    return found


def _options(context: click.Context) -> dict[str, click.Option]:
    """Return the options that can be set per model, by name without the leading dashes."""
    options = [each for each in context.command.params if isinstance(each, click.Option) and each.name not in _OWN]
    return {flag.removeprefix("--"): option for option in options for flag in option.opts}


def _to_arguments(option: click.Option, value: Any) -> list[str]:
    flag = option.opts[0]
    if option.is_flag:
        return [flag] if value else option.secondary_opts[:1]
    values = value if option.multiple else [value]
    return [text for each in values for text in (flag, str(each))]


def _read_option_files(directory: Path) -> dict[str, Mapping[str, Any]]:
    """Return the options in each ``NAME.yaml`` of ``directory``, by NAME."""
    if not directory.is_dir():
        raise UsageError(f"--per-model {directory}: no such directory")
    return {path.stem: _read(path) for path in sorted(directory.glob("*.yaml"))}


def _read(path: Path) -> Mapping[str, Any]:
    import yaml

    from bf16kit.artifact.reading import read_bounded

    data = read_bounded(path, _LARGEST, UsageError, "the limit for a file of options")
    try:
        fields = yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(fields, dict):
        raise UsageError(f"{path}: expected one option per line, such as `model: pkg.mod:factory`")
    return fields


def _arguments(context: click.Context, fields: Mapping[str, Any], where: str) -> Arguments:
    """Return the command line that ``fields`` of a YAML file stand for; null removes what was set for all models."""
    options, found = _options(context), dict[str, list[str]]()
    for key, value in fields.items():
        option = options.get(str(key))
        if option is None:
            known = ", ".join(sorted([*options, _NAME]))
            raise UsageError(f"{where}: unknown option {str(key)!r}; known: {known}")
        found[option.name or ""] = [] if value is None else _to_arguments(option, _value(option, key, value, where))
    return found


def _value(option: click.Option, key: str, value: Any, where: str) -> Any:
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {key} is {value!r}, expected true or false")
        return value
    if option.multiple:
        if isinstance(value, dict):  # budget
            return [f"{name}={bound}" for name, bound in value.items()]
        return value if isinstance(value, list) else [value]
    if isinstance(value, dict):  # model-args
        return json.dumps(value)
    if isinstance(value, list):
        raise UsageError(f"{where}: {key} is {value!r}, expected one value")
    return value
