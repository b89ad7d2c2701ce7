"""The options of a conversion, parsed and checked before any long work begins."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from bf16kit.converter.process.quiet import user_frame
from bf16kit.drift.metrics import Budget
from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import with_similar
from bf16kit.numerics.tensors import BY_NAME, Array, Kind, TensorSpec

Format = Literal["onnx", "torchscript", "pt2", "safetensors", "hf"]
Export = Literal["safetensors", "hf"]
Profile = Literal["cpu", "cpu-bf16", "cuda"]

_DIM = re.compile(r"0*[1-9][0-9]*|[A-Za-z_]\w*")
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NEEDS_LIGHTNING = (
    "; a LightningModule needs Lightning: pip install 'bf16kit[lightning]', or name a factory of the plain torch module"
)
_EXAMPLE = "for example input_ids:int64:batch,seq"
_RECORDED = (
    *("profiles", "formats", "keep_fp32", "bf16", "subnormals", "saturate", "residual"),
    *("allow_over_budget", "drop_failing_profiles", "search", "with_past"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """The directory ``REPOSITORY/MODEL/VERSION`` that becomes the artifact."""

    path: Path
    model: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one conversion. Empty ``formats`` mean ONNX; TorchScript if no ONNX graph can be made.

    ``optional`` are profiles that the user did not ask for. Each is written if it is of use, judged by the same budget
    as the others, and left out with a note if it is over. ``recorded_extra`` are further options for the manifest to
    record. ``module`` is the torch module to convert if the source is one in memory; ``source`` is its name then, for
    messages. ``samples`` is what ``--samples`` names, or a sequence of feeds, and ``examples`` returns some
    of them, for inputs.
    """

    source: Path
    target: Target
    model: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: Mapping[str, Kind] = field(default_factory=dict)
    samples: str | Sequence[Any] | None = None
    formats: tuple[Format, ...] = ()
    profiles: tuple[Profile, ...] = ("cpu", "cuda")
    optional: tuple[Profile, ...] = ()
    keep_fp32: tuple[str, ...] = ()
    bf16: tuple[str, ...] = ()
    budget: Budget = field(default_factory=Budget)
    allow_over_budget: bool = False
    drop_failing_profiles: bool = False
    search: bool = True
    search_minutes: float = 5.0
    subnormals: Literal["keep", "flush"] = "keep"
    saturate: bool = False
    residual: bool = True
    report: bool = True
    seed: int = 0
    force: bool = False
    trust_code: bool = False
    with_past: bool = False
    map: Path | None = None
    step: int | None = None
    item: str | None = None
    signature: str | None = None
    recorded_extra: Mapping[str, Any] = field(default_factory=dict)
    module: Any = None
    examples: Callable[[Sequence[TensorSpec]], list[dict[str, Array]]] | None = None

    @property
    def writes_onnx(self) -> bool:
        return not self.formats or "onnx" in self.formats

    @property
    def onnx_profiles(self) -> tuple[Profile, ...]:
        """The profiles that must be written as ONNX graphs."""
        return self.profiles if self.writes_onnx else ()

    @property
    def optional_profiles(self) -> tuple[Profile, ...]:
        """The profiles to write as well, if they are of use."""
        return self.optional if self.writes_onnx else ()

    def traced(self, *, has_graph: bool) -> tuple[Format, ...]:
        """Return the formats to write from the torch module; by default TorchScript, if there is no ONNX graph."""
        known: tuple[Format, ...] = ("torchscript", "pt2")
        wanted = self.formats or (() if has_graph else ("torchscript",))
        return tuple(name for name in known if name in wanted)

    @property
    def export(self) -> Export | None:
        """The format of the export for other programs, or None. ``hf`` contains a safetensors checkpoint."""
        return "hf" if "hf" in self.formats else "safetensors" if "safetensors" in self.formats else None

    @property
    def stores_export(self) -> bool:
        """Whether the artifact's weights are those of its export: no ONNX graph needs them in another layout."""
        return self.export is not None and not self.writes_onnx

    def recorded(self) -> dict[str, Any]:
        """Return the options that shaped the artifact's bytes, for the manifest; without paths."""
        always = {name: getattr(self, name) for name in _RECORDED}
        given = {name: value for name in ("weights", "signature") if (value := getattr(self, name)) is not None}
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in always.items()}
        return {**lists, "optional_profiles": list(self.optional), **given, **self.recorded_extra}


def parse_target(path: Path) -> Target:
    """Parse ``path`` as ``REPOSITORY/MODEL/VERSION``; raise :class:`UsageError` if it does not end in a version ≥ 1."""
    absolute = path.absolute()
    version, model = absolute.name, absolute.parent.name
    if not re.fullmatch(r"[1-9][0-9]{0,17}", version):  # what servers take for a version
        raise UsageError(
            f"--out {path}: must end in MODEL/VERSION, with a version of 1 or more, of at most 18 digits, and ends in"
            f" {version!r}"
        )
    return Target(absolute, parse_model_name(f"--out {path}", model), int(version))


def parse_model_name(where: str, name: str) -> str:
    """Return ``name`` if it can name a model's directory; else raise :class:`UsageError` that begins with ``where``."""
    if not _MODEL.fullmatch(name):
        raise UsageError(f"{where}: {name!r} is not a model name; use letters, digits and . _ + -")
    return name


def parse_inputs(texts: Iterable[str]) -> tuple[TensorSpec, ...]:
    """Parse each ``NAME:DTYPE:DIMS`` into a spec. Dimensions are sizes or names; a scalar has none."""
    specs: dict[str, TensorSpec] = {}
    for text in texts:
        name, dtype, dims = (["", "", *text.rsplit(":", 2)])[-3:]
        if not name:
            raise UsageError(f"--input {text!r}: expected NAME:DTYPE:DIMS, {_EXAMPLE}")
        if dtype not in BY_NAME or dtype == "string":
            known = ", ".join(d for d in BY_NAME if d != "string")
            raise UsageError(f"--input {text!r}: unknown dtype {dtype!r}; known: {known}")
        if name in specs:
            raise UsageError(f"--input {name}: given twice")
        shape = [dim.strip() for dim in dims.split(",")] if dims.strip() else []
        for dim in shape:
            if not _DIM.fullmatch(dim):
                raise UsageError(f"--input {text!r}: {dim!r} is neither a size of 1 or more nor a name, {_EXAMPLE}")
        specs[name] = TensorSpec(name, dtype, tuple(int(dim) if dim.isdecimal() else dim for dim in shape))
    return tuple(specs.values())


def parse_outputs(texts: Iterable[str]) -> dict[str, Kind]:
    """Parse each ``NAME:KIND``. An output's kind decides which bounds it can be judged by."""
    kinds: dict[str, Kind] = {}
    for text in texts:
        name, _, kind = text.rpartition(":")
        if not name or kind not in get_args(Kind):
            raise UsageError(f"--output {text!r}: expected NAME:KIND, the kind one of {', '.join(get_args(Kind))}")
        if name in kinds:
            raise UsageError(f"--output {name}: given twice")
        kinds[name] = cast("Kind", kind)
    return kinds


def parse_patterns(flag: str, texts: Iterable[str]) -> tuple[str, ...]:
    """Return the regular expressions given to ``flag``; raise :class:`UsageError` for one that does not compile."""
    patterns = tuple(texts)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{flag} {pattern!r}: not a regular expression: {error}") from None
    return patterns


def parse_model_args(text: str | None) -> dict[str, Any]:
    """Parse the JSON object given to ``--model-args``: keyword arguments of the factory."""
    import json

    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--model-args: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f'--model-args: expected a JSON object such as {{"hidden": 64}}, got {text!r}')
    return value


def is_import_spec(text: str) -> bool:
    """Whether ``text`` has the form ``pkg.mod:attribute``."""
    return _SPEC.fullmatch(text) is not None


def _import_spec(file: str, attribute: str) -> str:
    """Return what to write instead of the ``file`` of a module; an example, if it is none."""
    path = Path(file)
    if path.suffix != ".py" and "/" not in file:
        return "for example mypackage.models:build"
    elsewhere = path.is_absolute() or ".." in path.parts
    module = path.stem if elsewhere else ".".join(path.with_suffix("").parts)
    where = f", with PYTHONPATH={path.parent} in the environment" if elsewhere else ""
    return f"not a path: write {module}:{attribute or 'NAME'}{where}"


def import_callable(flag: str, text: str) -> Callable[..., Any]:
    """Return the callable that ``flag`` names; modules in the user's working directory are found too.

    Raises :class:`UsageError` if the module or its attribute does not exist or cannot be called.
    """
    module_name, _, attribute = text.partition(":")
    if not is_import_spec(text) or module_name.endswith(".py"):
        missing = "no such file; " if text.endswith(".onnx") else ""
        raise UsageError(f"{flag} {text!r}: {missing}expected pkg.mod:name, {_import_spec(module_name, attribute)}")
    sys.path.insert(0, "")  # the working directory: a console script lacks it, but users expect it, as of `python -m`
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the user's module runs at import and may raise anything
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        remedy = user_frame(error)
        if missing in ("lightning", "pytorch_lightning"):
            remedy += _NEEDS_LIGHTNING
        elif missing == module_name.partition(".")[0]:
            remedy = "; run in the directory that holds it, or set PYTHONPATH to that"
        raise UsageError(
            f"{flag} {text}: cannot import {module_name}: {type(error).__name__}: {error}{remedy}"
        ) from error
    finally:
        if "" in sys.path:  # unless the module has removed it
            sys.path.remove("")
        if "" not in sys.path:  # as it is in an interactive Python
            sys.path.append("")  # for what the callable imports: last, it hides no module of ours or of a library's
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{flag} {text}: module {module_name} has no {with_similar(attribute, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{flag} {text}: is {type(found).__name__}, expected a function or class")
    return found  # type: ignore[no-any-return]
