"""A Lightning checkpoint's hyper-parameters as defaults of ``--model-args``, if the factory accepts them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from bf16kit.messages.wording import first_few

_NAMED = 8
_LONGEST = 30  # characters of a value in a note
_NOT_NAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)


def arguments(
    factory: Callable[..., Any], explicit: Mapping[str, Any], found: Mapping[str, Any], argument: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return keyword arguments for ``factory``, and notes on which came from the file and which were left out.

    ``explicit`` overrides ``found``. As in Lightning's ``load_from_checkpoint``, ``found`` is passed as one mapping if
    the factory has a parameter called ``argument``. Otherwise the names that its signature does not accept are left
    out.
    """
    accepted, any_name = _parameters(factory)
    if argument in accepted and found:
        given = {argument: dict(found)} | dict(explicit)
        text = f"{argument}={{{', '.join(found)}}}"
        return given, [f"hyper-parameters of the file passed to --model: {text}"] if argument not in explicit else []
    usable = {name: value for name, value in found.items() if any_name or name in accepted}
    overruled = [name for name in usable if name in explicit]
    used = {name: value for name, value in usable.items() if name not in explicit}
    ignored = [name for name in found if name not in usable and name not in explicit]
    notes = [
        f"{what}: {first_few(names, _NAMED)}"
        for what, names in (
            ("hyper-parameters of the file passed to --model", [f"{n}={_shown(v)}" for n, v in used.items()]),
            ("--model-args in place of the file's hyper-parameters", overruled),
            ("hyper-parameters of the file that --model does not take", ignored),
        )
        if names
    ]
    return used | dict(explicit), notes


def _parameters(factory: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names that can be passed by keyword, and whether any other name can be, too."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a factory written in C may have no signature: it gets only explicit arguments
        return set(), False
    named = {one.name for one in parameters if one.kind not in (*_NOT_NAMED, inspect.Parameter.VAR_KEYWORD)}
    return named, any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def _shown(value: object) -> str:
    if isinstance(value, bool | int | float | str | None):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return type(value).__name__
