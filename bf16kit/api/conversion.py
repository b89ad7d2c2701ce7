"""``bf16kit.convert``: what ``bf16-convert checkpoint`` does, for a path or for a model that is in memory."""

from __future__ import annotations

import html
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.disk import DiskSize, disk_size
from bf16kit.converter.convert import convert as run
from bf16kit.converter.keywords import Keywords, options_of
from bf16kit.converter.process import progress as shown
from bf16kit.converter.read.sources import parameters_of
from bf16kit.converter.report import page
from bf16kit.converter.report.closing import closing
from bf16kit.converter.report.figures import Figures, Island
from bf16kit.converter.verify import samples as feeds
from bf16kit.drift.table import Drift
from bf16kit.messages.errors import InvalidRequest, UsageError
from bf16kit.messages.wording import html_table, size
from bf16kit.numerics.tensors import TensorSpec, describe, feed_of
from bf16kit.runtime.ort import kernel

if TYPE_CHECKING:
    import torch
    from onnx import ModelProto

Source: TypeAlias = "str | PathLike[str] | torch.nn.Module | ModelProto"
_LARGEST_PROTO = 2**31 - 1  # bytes: protobuf writes no larger message


@dataclass(frozen=True)
class Report:
    """The report of a conversion: a page in a notebook, text elsewhere."""

    text: str
    page: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        frame = 'style="width: 100%; height: 40em; border: 0"'
        return f'<iframe title="Conversion report" {frame} srcdoc="{html.escape(self.page)}"></iframe>'


@dataclass(frozen=True)
class Conversion:
    """A published artifact and what its conversion measured. ``notes`` are sentences for the user.

    A notebook shows it as tables; ``print`` as text.
    """

    artifact: Artifact
    notes: tuple[str, ...]
    seconds: float

    @property
    def path(self) -> Path:
        """The artifact's directory, for :func:`bf16kit.load` and, two levels up, :func:`bf16kit.serve`."""
        return self.artifact.path

    @cached_property
    def drift(self) -> Drift:
        """Drift from the fp32 reference by profile, output and metric, with the budget's verdict."""
        return Drift(self._figures.drift)

    @property
    def islands(self) -> tuple[Island, ...]:
        """What stays in fp32 though its profile computes in bf16, with the reason."""
        return tuple(self._figures.islands)

    @property
    def budget(self) -> dict[str, float]:
        """The bounds by name, such as ``relative_l2``; a bound of a quantile is ``relative_l2.p99``."""
        return dict(self.artifact.manifest.budget)

    @property
    def sizes(self) -> DiskSize:
        """Bytes of the source's tensors, and of the artifact."""
        return disk_size(self.artifact)

    def report(self) -> Report:
        """Return the report that ``report.html`` holds; UsageError if the packages that draw it are missing."""
        page.check_installed()
        manifest = self.artifact.manifest
        drawn = page.render(manifest, manifest.files, self.notes, self.artifact.measurements())
        return Report(repr(self), drawn)

    @cached_property
    def _figures(self) -> Figures:
        manifest = self.artifact.manifest
        return Figures(manifest, manifest.files, self.artifact.measurements())

    def __repr__(self) -> str:
        return closing(self.artifact, self.notes, self.seconds, verbose=True)

    @property
    def _headline(self) -> str:
        path = self.path.relative_to(Path.cwd()) if self.path.is_relative_to(Path.cwd()) else self.path
        return f"{self._figures.headline} {size(self.sizes.checkpoint)} became {path} in {self.seconds:.1f} s."

    def _repr_html_(self) -> str:
        name = html.escape(self.artifact.manifest.model)
        bounded = Drift(row for row in self.drift.rows if row.bound is not None)
        parts = [f"<p><b>{name}</b>: {html.escape(self._headline)}</p>", bounded._repr_html_()]
        if self.islands:
            rows = [(each.profile, each.name, each.op, each.reason) for each in self.islands]
            parts.append(html_table("fp32 islands", ("profile", "node", "op", "reason"), rows))
        return "".join([*parts, "<ul>", *(f"<li>{html.escape(note)}</li>" for note in self.notes), "</ul>"])


def convert(
    source: Source, /, *, out: str | PathLike[str], progress: bool = False, **options: Unpack[Keywords]
) -> Conversion:
    """Convert ``source`` into the artifact ``out``, ``REPOSITORY/MODEL/VERSION``, and measure what that costs.

    ``source`` is a path as for ``bf16-convert checkpoint``, a ``torch.nn.Module``, or an ``onnx.ModelProto``. It stays
    as it is: a module is converted as it answers in evaluation mode, in fp32, on the CPU. ``options`` are those of the
    command, by the names of its flags: ``budget={"relative_l2": 1e-2}``, ``input={"x": ("float32", ["batch", 16])}``,
    ``profile=["cpu"]``, ``search=False``. ``samples`` are inputs to measure on: one array or a mapping by name is one
    feed, anything else that can be iterated yields feeds, of numpy's or torch's arrays; or a text as for ``--samples``.
    A module's inputs are those of ``input``, or else are taken from the samples: their first dimension is free if all
    inputs share it, and so is every other whose size differs between samples. ``progress`` shows each step.

    Nothing is published unless all succeeds: raises :class:`UsageError` for wrong options or unreadable input,
    :class:`ConversionError` for a model that cannot be converted, :class:`RuntimeFailure` if the result does not run,
    and :class:`BudgetExceeded`, with the figures as ``drift``, if drift is over budget, unless ``allow_over_budget``.

    >>> import numpy as np, torch, bf16kit
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    >>> x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    >>> result = bf16kit.convert(mlp, out="repository/mlp/1", samples=x, budget={"relative_l2": 0.02})
    >>> result.drift.within, list(result.drift["cpu"]["output"])[:2]
    (True, ['relative_l2', 'cosine_distance'])
    """
    began = time.monotonic()
    kernel.configured_kernel()  # reports a wrong BF16KIT_KERNEL_PATH now, not when the first graph runs
    if "samples" in options:
        options["samples"] = listed(options["samples"])
    with ExitStack() as stack:
        if isinstance(source, str | PathLike):
            parsed = options_of(Path(source), Path(out), options)
        elif _is(source, "onnx", "ModelProto"):
            parsed = options_of(stack.enter_context(_saved(source)), Path(out), options)
        elif _is(source, "torch.jit", "ScriptModule"):
            raise UsageError(
                "the module is TorchScript; save it with torch.jit.save, and convert the file with trust_code=True"
            )
        elif _is(source, "torch.nn", "Module"):
            module = getattr(source, "_orig_mod", source)  # torch.compile's wrapper holds it
            parsed = options_of(Path(f"<{type(module).__name__}>"), Path(out), options, module=module)
        else:
            raise TypeError(
                f"convert() takes a path, a torch.nn.Module or an onnx.ModelProto, not {type(source).__name__}"
            )
        notes: tuple[str, ...] = ()
        if parsed.module is not None and not parsed.inputs:
            parsed = replace(parsed, inputs=inputs_of(parsed.module, parsed.samples))
            found = ", ".join(f"{spec.name} {spec.dtype}{describe(spec.shape)}" for spec in parsed.inputs)
            notes = (
                f"the inputs are those of the samples: {found}; to name others, pass input={{NAME: (DTYPE, DIMS)}}",
            )
        bar = stack.enter_context(shown.for_stream(sys.stderr)) if progress else None
        result = run(parsed, bar)
    return Conversion(result.artifact, (*notes, *result.notes), time.monotonic() - began)


def _is(source: object, module: str, name: str) -> bool:
    """Whether ``source`` is an instance of a class of a module that is imported already, as it is if there is one."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(source, kind)


def listed(given: Any) -> Any:
    """Return ``samples`` as text, None, or a list of feeds."""
    if given is None or isinstance(given, str | PathLike):
        return given if given is None else str(given)
    if isinstance(given, Mapping) or hasattr(given, "shape"):
        return [given]
    try:
        iterator = iter(given)
    except TypeError:
        raise UsageError(
            f"samples: is {type(given).__name__}; expected an array, a mapping of arrays by input, or an iterable"
        ) from None
    return list(itertools.islice(iterator, feeds.LIMIT))


@contextmanager
def _saved(model: Any) -> Iterator[Path]:
    """Write ``model``, a ModelProto, to a temporary file, which ONNX Runtime and the oracle read."""
    if (needed := model.ByteSize()) > _LARGEST_PROTO:
        raise UsageError(
            f"the ModelProto has {size(needed)}, and protobuf writes no more than 2 GiB; save it with"
            " onnx.save(model, path, save_as_external_data=True), and convert the path"
        )
    with tempfile.TemporaryDirectory(prefix="bf16kit-source-") as directory:
        path = Path(directory) / "ModelProto.onnx"
        path.write_bytes(model.SerializeToString(deterministic=True))
        yield path


def inputs_of(module: torch.nn.Module, given: str | Sequence[Any] | None) -> tuple[TensorSpec, ...]:
    """Return the inputs of ``module`` as ``given``, feeds, show them; :class:`UsageError` if they cannot."""
    wanted = 'pass input={NAME: (DTYPE, DIMS)}, for example input={"x": ("float32", ["batch", 16])}'
    if not given or isinstance(given, str):
        raise UsageError(f"a module does not describe its inputs; {wanted}, or samples as arrays")
    first = given[0]
    named, takes_more = parameters_of(module)
    count = len(first) if isinstance(first, Mapping | list | tuple) else 1
    more = [f"input_{place}" for place in range(len(named), count)] if takes_more else []
    names = list(first) if isinstance(first, Mapping) else [*named, *more][:count]
    sizes: dict[tuple[str, int], tuple[int, ...]] = {}
    try:
        found = [feed_of(each, [TensorSpec(str(name), "float32", ()) for name in names]) for each in given]
        if len({tuple((name, array.ndim) for name, array in feed.items()) for feed in found}) > 1:
            raise InvalidRequest("other names or ranks")
        for name, array in found[0].items():
            sizes |= {(name, axis): tuple(feed[name].shape[axis] for feed in found) for axis in range(array.ndim)}
    except InvalidRequest as error:
        raise UsageError(f"samples: they do not have the same inputs ({error}); {wanted}") from None
    firsts = {seen for (_, axis), seen in sizes.items() if axis == 0}
    shared = {seen: "batch" for seen in firsts if len(firsts) == 1}  # names of free dimensions, by their sizes

    def dim(name: str, axis: int) -> int | str:
        seen = sizes[name, axis]
        fixed = len(set(seen)) == 1 and not (axis == 0 and seen in shared)
        return seen[0] if fixed else shared.setdefault(seen, f"{name}_{axis}")

    arrays = found[0].items()
    return tuple(TensorSpec(n, a.dtype.name, tuple(dim(n, axis) for axis in range(a.ndim))) for n, a in arrays)
