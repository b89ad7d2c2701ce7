"""The options of ``bf16-convert checkpoint`` as keywords, and what both the command line and Python make of them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from bf16kit.converter import options as parse
from bf16kit.converter.options import Format, Options, Profile
from bf16kit.drift.metrics import Budget
from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import quoted
from bf16kit.numerics.tensors import Kind

Dims: TypeAlias = Sequence[int | str]


class Keywords(TypedDict, total=False):
    """What ``bf16-convert checkpoint --help`` describes, by the names of its flags; None means not given.

    What may be given several times is a sequence, or a mapping by name. The text of the command line will do as well.
    """

    force: bool
    model: str | PathLike[str] | None
    map: str | PathLike[str] | None
    step: int | None
    item: str | None
    model_args: Mapping[str, Any] | str | None
    weights: str | None
    input: Mapping[str, tuple[str, Dims]] | Sequence[str | tuple[str, str, Dims]] | str | None
    output: Mapping[str, Kind] | Sequence[str] | str | None
    samples: Any  # a text as for --samples, or feeds: see :func:`bf16kit.converter.verify.samples.load`
    format: Sequence[Format] | Format | None
    profile: Sequence[Profile] | Profile | None
    signature: str | None
    with_past: bool
    keep_fp32: Sequence[str] | str | None
    bf16: Sequence[str] | str | None
    budget: Mapping[str, float | None] | Sequence[str] | str | None
    allow_over_budget: bool
    search: bool
    search_minutes: float
    drop_failing_profiles: bool
    subnormals: Literal["keep", "flush"]
    saturate: bool
    residual: bool
    report: bool
    seed: int
    trust_code: bool


NAMES = tuple(Keywords.__annotations__)
_CHOICES = {"format": get_args(Format), "profile": get_args(Profile), "subnormals": ("keep", "flush")}
_TEXTS = ("model", "map", "weights", "signature", "item")
_FLAGS = [option.name for option in fields(Options) if isinstance(option.default, bool)]


def options_of(source: Path, out: Path, given: Mapping[str, Any], *, module: Any = None) -> Options:
    """Return the options that ``given`` holds, :class:`Keywords`; ``module`` is a source that is in memory.

    A mistake in any of them is reported before long work begins: TypeError for an unknown name, and
    :class:`UsageError` for a value that is wrong.
    """
    for name in (name for name in given if name not in NAMES):
        similar = difflib.get_close_matches(name, [*NAMES, "out", "progress"], 1)
        hint = f"; did you mean {similar[0]!r}?" if similar else f"; the options are {', '.join(NAMES)}"
        raise TypeError(f"convert() got an unexpected keyword argument {name!r}{hint}")
    values = {name: value for name, value in given.items() if value is not None}
    _check(values)
    values |= {name: os.fspath(values[name]) for name in _TEXTS if name in values}
    formats, profiles = _texts("format", values.pop("format", ())), _texts("profile", values.pop("profile", ()))
    if profiles and formats and set(formats) <= {"safetensors", "hf"}:
        raise UsageError(
            f"--profile {profiles[0]}: profiles are only for ONNX; pass --format onnx as well, or leave out --profile"
        )
    for flag in ("keep_fp32", "bf16"):
        values[flag] = parse.parse_patterns(f"--{flag.replace('_', '-')}", _texts(flag, values.get(flag, ())))
    if (arguments := values.pop("model_args", None)) is not None:
        values["model_args"] = arguments if isinstance(arguments, Mapping) else parse.parse_model_args(arguments)
    if "map" in values:
        values["map"] = Path(values["map"])
    return parse.Options(
        **values
        | {
            "source": source,
            "target": parse.parse_target(out),
            "module": module,
            "inputs": parse.parse_inputs(_texts("input", values.pop("input", ()), _input)),
            "outputs": parse.parse_outputs(_texts("output", values.pop("output", ()), ":".join)),
            "formats": formats,
            "profiles": profiles or ("cpu", "cuda"),
            "optional": () if profiles else ("cpu-bf16",),
            "budget": Budget.parse(_texts("budget", values.pop("budget", ()), lambda item: f"{item[0]}={item[1]}")),
        }
    )


def _check(values: Mapping[str, Any]) -> None:
    """Check what the command line's own parser would: choices, switches and ranges."""
    for name, choices in _CHOICES.items():
        for each in _texts(name, values.get(name, ())):
            if each not in choices:
                raise UsageError(f"--{name} {each}: is not one of {', '.join(choices)}")
    for name, kind, least in (("seed", int, 0), ("step", int, 0), ("search_minutes", (int, float), 1e-9)):
        value = values.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:
            whole = "a whole number of 0 or more" if least == 0 else "a number above 0"
            raise UsageError(f"--{name.replace('_', '-')} {quoted(value)}: expected {whole}")
    for name in _FLAGS:
        if not isinstance(values.get(name, True), bool):
            raise UsageError(f"{name}={quoted(values[name])}: expected True or False")
    for name in _TEXTS:
        if not isinstance(values.get(name, ""), str | PathLike):
            hint = "; to convert a module that is in memory, pass it in place of the path" if name == "model" else ""
            raise UsageError(f"{name}={quoted(values[name])}: expected text{hint}")


def _texts(name: str, value: Any, join: Any = str) -> tuple[str, ...]:
    """Return the texts of the command line that say the same as ``value``; ``join`` makes one of an item of several."""
    if isinstance(value, str):
        return (value,)
    items: Iterable[Any] = value.items() if isinstance(value, Mapping) else value
    try:
        return tuple(item if isinstance(item, str) else join(item) for item in items)
    except (TypeError, ValueError, IndexError):
        raise UsageError(
            f"{name}={quoted(value)}: is neither text nor a sequence or mapping of it; docs/python.md has examples"
        ) from None


def _input(item: Any) -> str:
    """Return ``NAME:DTYPE:DIMS`` for ``(name, dtype, dims)`` or, of a mapping, ``(name, (dtype, dims))``."""
    name, *rest = item
    dtype, dims = rest[0] if len(rest) == 1 else rest
    return f"{name}:{dtype}:{dims if isinstance(dims, str) else ','.join(map(str, dims))}"
