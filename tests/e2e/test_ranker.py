"""A ranker, whose output is one score per row that passes through 0: its relative errors say nothing about it."""

from itertools import count
from pathlib import Path

import faultymodels
import ml_dtypes
import numpy as np
import pytest
from faultymodels import WIDTH
from loopback import infer_request
from onnx import ModelProto
from serverprocess import Serve
from waiting import until
from workerprocesses import Client

import graphs
from bf16kit.service.drift.sampler import QUEUE_SIZE
from bf16kit.service.telemetry.families import CAUSES

SERVING = "shadow: {rate: 1, max_per_second: 1000}\nfallback: {policy: fp32, min_stay_seconds: 600}\n"
REQUESTS = 200
PATIENCE_S = 90


def ranker(*, rounded: bool = False, scale: float = 1.0) -> ModelProto:
    """Return ``y = relu(x·a)·b``, fp32[batch,64] → fp32[batch,1]; b is multiplied by ``scale``."""
    a = graphs.values(WIDTH, WIDTH, seed=1)
    b = graphs.values(WIDTH, 1, seed=2) * np.float32(scale)
    if rounded:
        a, b = (weight.astype(ml_dtypes.bfloat16).astype(np.float32) for weight in (a, b))
    text = f"(float[batch,{WIDTH}] x) => (float[batch,1] y) {{ h = MatMul(x, a) r = Relu(h) y = MatMul(r, b) }}"
    return graphs.parsed(text, a=a, b=b)


@pytest.mark.long
def test_a_sound_ranker_is_left_alone_and_damaged_ones_are_found(tmp_path: Path, serve: Serve) -> None:
    repository = tmp_path / "repository"
    sound = faultymodels.converted(ranker(), repository, "sound", tmp_path / "source")
    for name, scale in (("worse", 1.05), ("wrong", -1.0)):
        faultymodels.with_graph(sound, repository, name, ranker(rounded=True, scale=scale))
    for name in ("sound", "worse", "wrong"):
        (repository / name / "serving.yaml").write_text(SERVING)
    server, numbers = serve("--repository", repository).wait_ready(), count()
    metric = server.of_model

    def ask(model: str, number: int) -> tuple[str, float]:
        """Send a request of one row; return the precision of the response, and the score."""
        response = client.call("ModelInfer", infer_request(model, x=faultymodels.rows(1, 1000 + number)), timeout=60)
        (score,) = np.frombuffer(response.raw_output_contents[0], np.float32)
        return response.parameters["precision"].string_param, float(score)

    def ask_measured(model: str) -> list[tuple[str, float]]:
        found = []
        for number in range(REQUESTS):
            found.append(ask(model, number))
            if len(found) % (QUEUE_SIZE // 2) == 0:

                def measured() -> bool:
                    return metric("drift_samples_total", model, outcome="measured") == len(found)

                until(measured, PATIENCE_S, "measured samples")
        return found

    with Client(server.target) as client:
        answers = ask_measured("sound")
        scores = [score for _, score in answers]
        assert min(scores) < 0 < max(scores)
        assert min(map(abs, scores)) < 0.01 * float(np.std(scores)), "a relative error there would be large"
        assert {precision for precision, _ in answers} == {"bf16"}
        assert metric("drift_over_budget", "sound") == 0
        assert metric("fallback_transitions_total", "sound", to="fp32") == 0
        assert [metric("drift_cause", "sound", cause=cause) for cause in CAUSES] == [0] * len(CAUSES)
        assert metric("drift_changes_total", "sound", output="y") == 0
        assert 0 <= metric("drift_change_score", "sound", output="y") < 1, "the detector is calibrated, and quiet"

        ask_measured("worse")
        assert metric("drift_changes_total", "worse", output="y") >= 1
        assert metric("drift_over_budget", "worse") == 0, "a score may be wrong by half its variation"

        until(lambda: ask("wrong", next(numbers))[0] == "fp32", PATIENCE_S, "fp32 serves")

        def found_broken() -> bool:  # drift is measured anew from the fall to fp32 on
            ask("wrong", next(numbers))
            return metric("drift_over_budget", "wrong") == metric("drift_cause", "wrong", cause="broken") == 1

        until(found_broken, PATIENCE_S, "the cause")
