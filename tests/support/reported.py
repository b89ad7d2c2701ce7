"""A made-up manifest and measurements of an artifact, with an example of everything that a report can show."""

import math
import re
from functools import partial

import numpy as np

from bf16kit.artifact.manifest import (
    MEASUREMENTS,
    DriftEntry,
    FileEntry,
    Manifest,
    OracleEntry,
    OracleFigure,
    Plan,
    PlanEntry,
    ProfileEntry,
    Source,
    SpecEntry,
)
from bf16kit.drift.measurements import (
    DiagnosisEntry,
    IslandEntry,
    LayerEntry,
    Layers,
    Measurements,
    ProfileMeasurements,
    RemedyEntry,
    SearchEntry,
    ranges,
    sample_columns,
)
from bf16kit.drift.metrics import DriftSummary, SampleDrift
from bf16kit.numerics.rounding import Census

BUDGET = {"relative_l2": 1.5e-2, "relative_l2.p99": 2e-2, "cosine_distance": 5e-4, "top1_agreement": 0.99}
OFF = "encoder.layer.3.attention/MatMul_1"  # the layer at which the SQNR falls below its prediction
PROFILES = {"cpu": (1.7e-3, "host", "bf16-weights"), "cuda": (9e-3, "emulated", "bf16")}


def drifts(samples: int = 128, over: bool = False) -> dict[str, dict[str, list[SampleDrift]]]:
    """Return drifts by profile and output. ``over`` puts cuda over its budget."""
    rng = np.random.default_rng(7)
    found = {}
    for profile, (typical, _, _) in PROFILES.items():
        factor = 2.5 if over and profile == "cuda" else 1.0
        values = (factor * typical * rng.lognormal(0, 0.25, samples)).tolist()
        found[profile] = {"logits": [SampleDrift(v, v * v / 2, 3 * v, -20 * math.log10(v), 8, 8, 0) for v in values]}
    return found


def layers(count: int = 120) -> Layers:
    """Return the SQNRs along a graph: noise grows slowly, but one layer in the middle adds far too much."""
    rng = np.random.default_rng(3)
    rows = []
    for i in range(count):
        expected = 55 - 10 * math.log10(1 + i / 4)
        fault = 14 * math.exp(-(i - count // 2) / 12) if i >= count // 2 else 0.0
        name = OFF if i == count // 2 else f"encoder.layer.{i // 10}/MatMul_{i % 10}"
        measured = expected + float(rng.normal(0, 0.8)) - fault
        rows.append(
            LayerEntry(name=name, op="MatMul", weight=f"{name}.weight", depth=i, sqnr_db=measured, expected_db=expected)
        )
    return Layers(measured=count, rows=rows, diagnosis=DiagnosisEntry(ails=True, leaves=rows[count // 2]))


NORMALISED = "normalisation computes in fp32 with fp32 scale and bias, as in torch.autocast"
REMEDY = RemedyEntry(
    keep_fp32=rf"^({re.escape(OFF)}|encoder\.layer\.3\.attention/Softmax)$",
    nodes=[OFF, "encoder.layer.3.attention/Softmax"],
    output="logits",
    before_db=31.4,
    after_db=44.9,
)


CENSUS = {
    "embeddings.word_embeddings.weight": Census(count=11_720_448, subnormal=3, max_abs=0.9, min_abs_nonzero=1e-39),
    "pooler.dense.weight": Census(count=147_456, flushed_to_zero=12, max_abs=0.4, min_abs_nonzero=1e-43),
    "head.temperature": Census(count=512, overflow=2, max_abs=3.4e38, min_abs_nonzero=1.0),
    "unused.weight": Census(count=4096),
    **{
        f"encoder.layer.{i}.attention.self.query.weight": Census(count=147_456, max_abs=0.6, min_abs_nonzero=1e-9)
        for i in range(20)
    },
}
SEARCH = SearchEntry(
    candidates=41,
    before=1.62,
    after=0.61,
    islands=[IslandEntry(name=OFF, op="MatMul", remedy="its output in fp32", worth=1.58)],
    bf16_bytes=0.994,
    bf16_flops=0.962,
)


def measurements(samples: int = 128, over: bool = False, depth: int = 120) -> Measurements:
    columns = sample_columns(drifts(samples, over))
    profiles = {name: ProfileMeasurements(outputs=columns[name], layers=layers(depth)) for name in PROFILES}
    profiles["cuda"] = profiles["cuda"].model_copy(update={"search": SEARCH})
    if over:  # the converter searches for a remedy only if the budget is exceeded
        found = layers(depth)
        mended = DiagnosisEntry(ails=True, leaves=found.rows[depth // 2], remedy=REMEDY, tried=True)
        update = {"layers": found.model_copy(update={"diagnosis": mended})}
        profiles["cuda"] = profiles["cuda"].model_copy(update=update)
    return Measurements(profiles=profiles, ranges=ranges(CENSUS))


def plan(nodes: int = 120) -> Plan:
    """Return a plan with several kinds of reasons for tensors and nodes, and a node that a search kept in fp32."""
    bf16 = partial(PlanEntry, precision="bf16")
    fp32 = partial(PlanEntry, precision="fp32")
    kinds = (
        partial(bf16, op="MatMul", reason="bf16 multiplication with fp32 accumulation", code="product"),
        partial(fp32, op="Softmax", reason=NORMALISED, code="normalises"),
        partial(bf16, op="Add", reason="has a bf16 kernel", code="kernel"),
        partial(fp32, op="Shape", reason="gives int64, nothing to narrow", code="no_floats"),
    )
    cuda = [kinds[i % len(kinds)](name=f"layer{i // 4}/{i}") for i in range(nodes)]
    cpu = [fp32(name=e.name, op=e.op, reason="the cpu profile computes in fp32", code="profile") for e in cuda]
    kept = fp32(name=OFF, op="MatMul", reason="kept in fp32 to meet the budget of cuda", code="budget")
    tensors = [
        bf16(name=name, op="MatMul", reason=f"matrix of {found.count} values", code="matrix")
        for name, found in CENSUS.items()
    ]
    return Plan(tensors=tensors, nodes={"cpu": cpu, "cuda": [*cuda, kept]})


SIZES = {
    "cpu.onnx": 262_000, "cuda.onnx": 241_000, "golden.safetensors": 9_200, "measurements.json": 41_000,
    "reference.onnx": 198_000, "residual.bin": 45_300_000, "weights.bf16": 45_200_000, "weights.fp32": 161_000,
}  # fmt: skip


def manifest(samples: int = 128, over: bool = False, nodes: int = 120) -> Manifest:
    measured = {
        profile: DriftEntry(
            samples=samples,
            source="calibration.npz",
            outputs={output: DriftSummary.of(rows).as_dict() for output, rows in outputs.items()},
            emulated=PROFILES[profile][1] == "emulated",
        )
        for profile, outputs in drifts(samples, over).items()
    }
    return Manifest(
        schema_version=6,  # an older artifact: it has no slices
        model="sentence-classifier",
        inputs=[
            SpecEntry(name="input_ids", dtype="int64", shape=["batch", "sequence"]),
            SpecEntry(name="attention_mask", dtype="int64", shape=["batch", "sequence"]),
        ],
        outputs=[SpecEntry(name="logits", dtype="float32", shape=["batch", 8], kind="logits")],
        batch_axis=0,
        profiles={
            name: ProfileEntry(
                format="onnx",
                graph=f"{name}.onnx",
                precision=precision,
                verified=verified,  # type: ignore[arg-type]  # one of its literals
                note="emulated on the CPU, not verified on a device" if verified == "emulated" else "",
                requires={"onnxruntime": "1.24"},
            )
            for name, (_, verified, precision) in PROFILES.items()
        },
        measurements=MEASUREMENTS,
        oracle=OracleEntry(
            checked=True,
            how="the torch module",
            feeds=4,
            outputs={"logits": OracleFigure(relative_l2=3.1e-7, max_abs=2.4e-6, bound=1e-5)},
        ),
        plan=plan(nodes),
        budget=BUDGET,
        drift=measured,
        files={name: FileEntry(sha256=f"{i:x}" * 64, bytes=size) for i, (name, size) in enumerate(SIZES.items())},
        source=Source(format="huggingface", sha256="4f" * 32, bytes=90_900_000, tensors=103),
        tools={"bf16kit": "0.1.0", "onnx": "1.20.0", "onnxruntime": "1.24.1", "torch": "2.13.0"},
    )
