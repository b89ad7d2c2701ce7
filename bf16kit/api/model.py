"""``bf16kit.load`` and ``bf16kit.compare``: an artifact as a function, and how far it is from another one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.metrics import Budget
from bf16kit.drift.table import Drift
from bf16kit.messages.errors import InvalidRequest, SamplesError, UsageError
from bf16kit.numerics.tensors import Array, TensorSpec, check_feeds, describe, feed_of
from bf16kit.runtime import RuntimeInfo

if TYPE_CHECKING:
    import torch

    from bf16kit.service.models.loading import LoadedModel


class Model:
    """A model that passed its golden samples, as a function of numpy's or torch's arrays; several threads may call it.

    ``model(x)``, ``model(x, mask)`` in the order of :attr:`inputs`, ``model(ids=x)`` and ``model({"ids": x})`` return
    the outputs as numpy arrays by name, also if there is only one: so nothing that calls it changes when a model gets
    another output. Raises :class:`InvalidRequest` for inputs that do not fit, :class:`RuntimeFailure` if the run fails.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    @property
    def artifact(self) -> Artifact:
        return self._loaded.opened.artifact

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of each input; a dimension is a size or a name."""
        return self._loaded.opened.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._loaded.opened.outputs

    @property
    def profile(self) -> str:
        """The profile that runs: cpu, cpu-bf16, cuda, torchscript or pt2."""
        return self.info.profile

    @property
    def info(self) -> RuntimeInfo:
        """Device, precision, and the accumulation that was measured on it."""
        return self._loaded.info

    @property
    def budget(self) -> Budget:
        """The bounds in force: the artifact's, as the model's ``serving.yaml`` changes them."""
        return self._loaded.opened.budget

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        names = [spec.name for spec in self.inputs]
        alone = len(args) == 1 and isinstance(args[0], Mapping)
        if len(args) > len(names) and not alone:
            raise InvalidRequest(f"{len(args)} inputs are given; the model's inputs are {', '.join(names) or 'none'}")
        feed = feed_of({**(args[0] if alone else dict(zip(names, args, strict=False))), **kwargs}, self.inputs)
        check_feeds(self.inputs, feed)
        return self._loaded.runtime.run({name: array.copy(order="C") for name, array in feed.items()})

    def close(self) -> None:
        """Free its memory now rather than when the last reference to it goes."""
        self._loaded.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        edges = [[f"{e.name} {e.dtype}{describe(e.shape)}" for e in side] for side in (self.inputs, self.outputs)]
        name, taken = self.artifact.manifest.model, " → ".join(map(", ".join, edges))
        return f"<bf16kit model {name!r}: {taken}; {self._loaded.summary}>"


def load(
    path: str | PathLike[str], profile: str | None = None, *, device: str = "auto", threads: int | None = None
) -> Model:
    """Load the artifact at ``path`` as ``bf16-serve`` does: check digests, run it, and judge its golden samples.

    ``profile`` is one of the artifact's, None the one that a server would choose on ``device`` (auto, cpu, cuda:N); the
    model's ``serving.yaml`` applies. ``threads`` work on one run; None leaves the number to the runtime.

    Raises :class:`ArtifactError` for a damaged artifact or a missing profile, :class:`BudgetExceeded` if the golden
    samples are over budget here, and :class:`RuntimeFailure` if it does not run.

    >>> model = bf16kit.load("repository/mlp/1", profile="cpu")
    >>> model(x)["output"].shape, model.profile, model.inputs[0].shape
    ((64, 4), 'cpu', ('batch', 16))
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads={threads}: expected 1 or more, or None")
    from bf16kit.service.models import loading
    from bf16kit.service.models.serving import load_serving

    serving = load_serving(Path(path).absolute().parent)
    if profile is not None:
        serving = serving.model_copy(update={"profile": profile})  # an unknown one is not in the artifact
    return Model(loading.load(Path(path), serving, device=device, threads=threads))


def compare(
    model: Model, reference: Callable[..., Any], samples: Any, *, budget: Mapping[str, float | None] | None = None
) -> Drift:
    """Measure how far the outputs of ``model`` are from those of ``reference``, by the metrics of a conversion.

    ``reference`` gets the inputs in the order of ``model.inputs``: a ``torch.nn.Module`` as tensors, in evaluation
    mode, from which it returns afterwards; any other function, such as another :class:`Model`, as numpy arrays. It
    returns a mapping by the names of the outputs, a sequence in their order, or one array. ``samples`` are as for
    :func:`bf16kit.convert`. ``budget`` changes bounds of the model's; None removes one.

    Raises :class:`UsageError` for samples that do not fit, or to which the reference answers NaN or another shape.

    >>> model = bf16kit.load("repository/mlp/1")
    >>> bf16kit.compare(model, mlp, x).within
    True
    """
    from bf16kit.api.conversion import listed
    from bf16kit.converter.verify import measure
    from bf16kit.converter.verify.samples import of_artifact
    from bf16kit.converter.verify.verify import expected_outputs
    from bf16kit.drift.verdicts import rows_of

    manifest, bounds = model.artifact.manifest, model.budget.override(budget or {})
    found = of_artifact(listed(samples), manifest)
    with _evaluating(reference):
        expected = expected_outputs(model.artifact, _by_name(reference, model), found)
    measured = measure.drifts(
        expected.outputs, (model(feed) for feed in expected.feeds), model.outputs, manifest.batch_axis, expected.scales
    )
    summaries = measure.summarise(measured).items()
    return Drift(row for name, each in summaries for row in rows_of(model.profile, name, each, bounds, emulated=False))


@contextmanager
def _evaluating(reference: object) -> Iterator[None]:
    """Put ``reference`` into evaluation mode, if it is a torch module, and each part of it back into its own."""
    modules = list(reference.modules()) if _is_module(reference) else []
    training = [each for each in modules if each.training]
    try:
        for each in training:
            each.training = False
        yield
    finally:
        for each in training:
            each.training = True


def _is_module(reference: object) -> TypeGuard[torch.nn.Module]:
    return "torch" in sys.modules and isinstance(reference, sys.modules["torch"].nn.Module)


def _by_name(reference: Callable[..., Any], model: Model) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """Return ``reference`` as a function of a feed that returns the model's outputs by name."""

    def run(feed: Mapping[str, Array]) -> dict[str, Array]:
        arrays = [feed[spec.name].copy() for spec in model.inputs]
        if _is_module(reference):
            import torch

            with torch.no_grad():
                answer = reference(*map(torch.from_numpy, arrays))
        else:
            answer = reference(*arrays)
        try:
            found = feed_of(answer, model.outputs)
        except InvalidRequest as error:
            raise SamplesError(f"what the reference returned does not fit: {error}") from None
        edges = [(spec.shape, feed[spec.name].shape) for spec in model.inputs]
        sizes = {dim: size for dims, shape in edges for dim, size in zip(dims, shape, strict=True)}
        for name, dims in ((spec.name, spec.shape) for spec in model.outputs):
            if name not in found:
                raise SamplesError(f"the reference returned no output {name!r}; it returned {', '.join(found)}")
            other, shape = found[name].shape, tuple(sizes.get(dim, dim) for dim in dims)
            pairs = zip(other, shape, strict=False)
            if len(other) != len(shape) or any(size != dim for size, dim in pairs if isinstance(dim, int)):
                raise SamplesError(f"the reference returned {name}{describe(other)}, the model's is {describe(shape)}")
        return {spec.name: found[spec.name] for spec in model.outputs}

    return run
