"""A second judge of every conversion that the tests make, so that no figure has only one witness.

It shares no formula with bf16kit: it reads the manifest and the measurements as JSON, runs the reference and each ONNX
profile again on a few samples, and computes each figure in float64 from its definition. To judge another metric, add
its formula to :data:`FORMULAS`; metrics without one are ignored.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.convert import build_measurements, publish
from bf16kit.converter.verify.running import open_profile
from bf16kit.messages.errors import ConversionError
from bf16kit.runtime import Runtime
from bf16kit.runtime.loading import load_reference

Array = NDArray[Any]
Feeds = Mapping[str, Array]

LARGEST = 8 << 20  # bytes of an artifact that is run again
FEEDS = 2  # samples that are run again
_TIE = 2.0**-18
_FILL = 1e3  # times the usual magnitude of an output's elements


def judge(path: Path, feeds: Sequence[Feeds] = ()) -> None:
    """Raise AssertionError if the artifact at ``path`` does not have the drift that it states, or is over its budget.

    ``feeds`` are the first samples that it was measured on. They are run again if the artifact is small and the source
    gives the same outputs each time.
    """
    manifest = json.loads((path / "manifest.json").read_bytes())
    measured = json.loads((path / "measurements.json").read_bytes())["profiles"]
    judged, outputs = manifest["profiles"].keys() | manifest.get("exports", {}).keys(), manifest["outputs"]
    assert manifest["drift"].keys() == measured.keys() == judged, f"the second judge: {path}: a profile without drift"
    for profile, drift in manifest["drift"].items():
        names = drift["outputs"].keys()
        assert names == measured[profile]["outputs"].keys() == {each["name"] for each in outputs}, f"{path}: {names}"
        for output, stats in drift["outputs"].items():
            where = f"the second judge: {path}, {profile}, {output!r}"
            made = "by perturbation" in drift["source"]  # these samples count in slices, agreement and nonfinite alone
            _check_statistics(where, stats, measured[profile]["outputs"][output], made)
            if not manifest["options"]["allow_over_budget"]:
                _check_budget(where, stats, manifest["budget"], drift["samples"])
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    if manifest.get("reference") and manifest.get("golden") and manifest["oracle"]["checked"] and size <= LARGEST:
        _run_again(path, manifest, measured, feeds[:FEEDS])


# --- the formulas -----------------------------------------------------------------------------------------------------


def _norm(x: Array) -> float:
    peak = float(np.abs(x).max(initial=0.0))
    return peak * math.sqrt(float(np.sum((x / peak) ** 2))) if peak else 0.0


def _relative_l2(r: Array, c: Array) -> float:
    return _norm(c - r) / _norm(r) if _norm(r) else (math.inf if _norm(c) else 0.0)


def _cosine_distance(r: Array, c: Array) -> float:
    if not _norm(r) or not _norm(c):
        return float(_norm(r) != _norm(c))
    return 1.0 - float(np.dot((r / _norm(r)).astype(np.longdouble), (c / _norm(c)).astype(np.longdouble)))


FORMULAS: dict[str, Callable[[Array, Array], float]] = {
    "relative_l2": _relative_l2,
    "cosine_distance": _cosine_distance,
    "max_abs": lambda r, c: float(np.abs(c - r).max(initial=0.0)),
}
"""A metric's value for one sample, from the reference and the candidate: flat, float64 and finite."""
_FAR = {"relative_l2": math.inf, "cosine_distance": 1.0, "max_abs": math.inf}


def figures(
    reference: Array, candidate: Array, logits: bool, fills: Collection[float] | None = None
) -> dict[str, float]:
    """Return all figures of one sample of one output; ``fills`` are those of the whole output of its feed."""
    r, c = np.asarray(reference, np.float64), np.asarray(candidate, np.float64)
    found: dict[str, float] = {}
    if logits and np.asarray(reference).dtype.kind in "iub":
        labels, counts = np.unique(r, return_counts=True)
        repeated = max(1, np.sum((r == c) & (r == labels[counts.argmax()]))) - 1 if r.size else 0
        found |= {"top1_matches": float(np.sum(r == c) - repeated), "top1_rows": float(r.size - repeated)}
    elif logits and r.ndim and r.size:
        best, other = r.max(-1), np.take_along_axis(r, c.argmax(-1)[..., None], -1)[..., 0]
        with np.errstate(invalid="ignore"):
            ties = (best == other) | (best - other <= _TIE * np.minimum(abs(best), abs(other)))
        found |= {"top1_matches": float(np.sum(ties)), "top1_rows": float(best.size)}
    kept = np.isfinite(r) & np.isfinite(c)
    found["nonfinite"] = float(np.sum(~kept & (r != c) & ~(np.isnan(r) & np.isnan(c))))
    for fill in _fills(reference) if fills is None else fills:
        kept &= (r != fill) | ((c != fill) & (c != _in_bf16(fill)))
    if found["nonfinite"]:
        return found | _FAR
    return found | {name: formula(r[kept], c[kept]) for name, formula in FORMULAS.items()}


def _fills(whole: Array) -> list[float]:
    """Return the ends of an output that stand for infinity: constants far beyond its usual magnitude."""
    every = np.asarray(whole, np.float64)
    every = every[np.isfinite(every)]
    ends = {float(every.min()), float(every.max())} if every.size else set()
    others = np.abs(every[(every != 0) & ~np.isin(every, list(ends))])
    usual = max(1.0, float(np.median(others))) if others.size else math.inf
    return [end for end in ends if abs(end) > _FILL * usual]


def _in_bf16(value: float) -> float:
    rounded = float(np.float32(value).astype(ml_dtypes.bfloat16))
    return rounded if math.isfinite(rounded) else math.copysign(3.3895313892515355e38, value)  # clamped


# --- the comparisons --------------------------------------------------------------------------------------------------


def _check_statistics(
    where: str, stats: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Any], made: bool
) -> None:
    """Compare the mean, quantiles and worst of each metric with the samples'."""
    samples = {name: np.array(columns[name], np.float64) for name in (*FORMULAS, "nonfinite")}  # "inf" is read too
    if len(samples["nonfinite"]) < columns["measured"]:
        return  # only some samples' rows were kept
    with np.errstate(divide="ignore"):
        samples["sqnr_db"] = -20.0 * np.log10(samples["relative_l2"])
    nonfinite = samples.pop("nonfinite").sum()
    _same(
        where,
        "nonfinite",
        min(stats["nonfinite"]["total"], nonfinite) if made else stats["nonfinite"]["total"],
        nonfinite,
    )
    for metric, values in samples.items():
        if metric not in stats and metric != "max_abs":
            continue  # one number per sample has no relative error
        worst_last = np.sort(values) if metric != "sqnr_db" else -np.sort(-values)
        finite, worst = values[np.isfinite(values)], worst_last[-1]
        _same(where, f"{metric}.mean", stats[metric]["mean"], finite.mean() if np.isfinite(worst) else worst)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("worst", 1.0)):
            place = math.ceil(share * len(values)) - 1
            _same(where, f"{metric}.{name}", stats[metric][name], worst_last[place])
    if columns["top1_rows"] and not made:
        share = sum(columns["top1_matches"]) / sum(columns["top1_rows"])
        _same(where, "top1_agreement", stats["top1_agreement"]["mean"], share)


def _check_budget(
    where: str, stats: Mapping[str, Mapping[str, Any]], budget: Mapping[str, float], samples: int
) -> None:
    for bound, allowed in budget.items():
        metric, _, quantile = bound.partition(".")
        if metric not in stats or (quantile == "p99" and samples < 100):
            continue
        judged = {"max_abs": "worst", "nonfinite": "total", "slice_error": "worst"}.get(metric, "mean")
        found = float(stats[metric].get(quantile or judged, stats[metric].get("mean", math.nan)))
        within = found >= allowed if metric in ("sqnr_db", "top1_agreement") else found <= allowed
        assert within, f"{where}: {bound} is {found}, over the budget of {allowed}"


def _same(where: str, what: str, stated: Any, found: float) -> None:
    stated = float(stated)
    close = stated == found or abs(stated - found) <= 1e-3 * abs(found) + 1e-12
    assert close, f"{where}: {what} is stated as {stated}, and is {found}"


# --- the runs ---------------------------------------------------------------------------------------------------------


def _run_again(path: Path, manifest: Mapping[str, Any], measured: Mapping[str, Any], feeds: Sequence[Feeds]) -> None:
    artifact = Artifact.open(path)
    golden = artifact.golden()
    *expected, answer = _outputs(load_reference(artifact), [*feeds, golden.inputs])
    for name, array in golden.outputs.items():
        np.testing.assert_array_equal(array, answer[name], err_msg=f"{path}: the golden samples' {name!r}")
    for profile, entry in manifest["profiles"].items():
        if entry["format"] != "onnx":
            continue  # a module that torch runs is measured in the worse of two arithmetics
        assert entry.get("requires"), f"the second judge: {path}: {profile} does not say which ONNX Runtime it needs"
        actual = _outputs(open_profile(artifact, profile)[0], feeds)
        for output in manifest["outputs"]:
            name, columns = output["name"], measured[profile]["outputs"][output["name"]]
            pairs = [
                (*pair, fills)
                for r, c in zip(expected, actual, strict=True)
                for fills in [_fills(r[name])]
                for pair in _samples(r[name], c[name], manifest)
            ]
            for place, (r, c, fills) in enumerate(pairs[: len(columns["nonfinite"])]):
                for metric, value in figures(r, c, output.get("kind") == "logits", fills).items():
                    where = f"the second judge: {path}, {profile}, {name!r}, sample {place}"
                    _same(where, metric, columns[metric][place], value)


def _outputs(runtime: Runtime, feeds: Sequence[Feeds]) -> list[dict[str, Array]]:
    try:
        return [runtime.run(feed) for feed in feeds]
    finally:
        runtime.close()


def _samples(reference: Array, candidate: Array, manifest: Mapping[str, Any]) -> Iterable[tuple[Array, Array]]:
    """Return the pairs that are measured: the rows of a batch, or the whole."""
    if reference.dtype == np.object_:  # strings: each is right or wrong
        reference, candidate = np.ones(reference.shape), (reference == candidate).astype(np.float64)
    axis = manifest.get("batch_axis")
    if axis is None or axis >= reference.ndim:
        return [(reference, candidate)]
    return zip(np.moveaxis(reference, axis, 0), np.moveaxis(candidate, axis, 0), strict=True)


# --- the hook ---------------------------------------------------------------------------------------------------------


@contextmanager
def judging_conversions() -> Iterator[None]:
    """Judge every artifact that this process converts: the conversion of one that is refused fails."""
    feeds: list[Feeds] = []

    def building(*given: Any) -> Any:
        feeds[:] = given[3][:FEEDS]
        return build_measurements(*given)

    def publishing_and_judging(*given: Any) -> Artifact:
        artifact = publish(*given)
        try:
            judge(artifact.path, feeds)
        except AssertionError as error:
            raise ConversionError(str(error)) from error
        return artifact

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bf16kit.converter.convert.build_measurements", building)
        patch.setattr("bf16kit.converter.convert.publish", publishing_and_judging)
        yield
