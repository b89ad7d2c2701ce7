"""The profile that a converted model is served with: the one that serving.yaml names, or the one that auto chooses."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from click.testing import CliRunner
from ownlog import restored_log
from serverprocess import Serve
from sessions import recorded_sessions

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.cli import run
from bf16kit.messages.errors import ArtifactError, Bf16kitError, BudgetExceeded, ConfigError, RuntimeFailure
from bf16kit.runtime import loading as runtimes
from bf16kit.runtime.ort import kernel
from bf16kit.service.cli import main
from bf16kit.service.models import goldengate, loading
from bf16kit.service.models.loading import LoadedModel
from bf16kit.service.models.serving import Serving

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
BOTH = ("cpu", "cpu-bf16")
Native = Callable[[bool], None]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a converted model of two matrix products, with every profile that is written by default."""
    directory = tmp_path_factory.mktemp("choice")
    onnx.save(graphs.mlp((64, 96, 64)), directory / "m.onnx")
    target = directory / "m" / "1"
    assert run(["checkpoint", str(directory / "m.onnx"), "--out", str(target), "--format", "onnx", "--no-report"]) == 0
    return target


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    """Return a function that sets whether the processor appears to have bf16 instructions."""
    return lambda said: monkeypatch.setattr(kernel, "multiplies_bf16", lambda: said)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that counts the sessions of ONNX Runtime that are open."""
    return recorded_sessions(monkeypatch)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of all runtimes loaded."""
    found: list[Any] = []
    load = runtimes.load

    def noted(*arguments: Any, **options: Any) -> Any:
        found.append(load(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(runtimes, "load", noted)
    return found


def loaded(path: Path, **serving: object) -> LoadedModel:
    return loading.load(path, Serving.model_validate(serving), device="auto", threads=1)


@pytest.mark.parametrize(
    ("native_bf16", "serving", "profile", "choice"),
    [
        (True, {}, "cpu-bf16", "auto: cpu-bf16 is within budget, and this processor multiplies bf16"),
        (False, {}, "cpu", "auto: cpu-bf16 was skipped, bf16 would be emulated here"),
        (True, {"budget": "between"}, "cpu", "auto: cpu-bf16 was skipped, its drift is over budget: output 'y'"),
        (False, {"profile": "cpu"}, "cpu", ""),
        (False, {"profile": "cpu-bf16"}, "cpu-bf16", ""),
    ],
    ids=str,
)
def test_one_profile_is_loaded_the_named_one_or_that_with_fewer_bits_which_fits(
    converted: Path,
    native: Native,
    opened: list[Any],
    in_memory: Callable[[], int],
    native_bf16: bool,
    serving: dict[str, object],
    profile: str,
    choice: str,
) -> None:
    native(native_bf16)
    if "budget" in serving:
        drift = Artifact.open(converted).manifest.drift
        between = np.mean([drift[profile].outputs["y"]["relative_l2"]["mean"] for profile in BOTH])
        serving = {"budget": {"relative_l2": float(between)}}
    found = loaded(converted, **serving)
    assert found.runtime.info.profile == found.info.profile == profile
    assert found.info.choice.startswith(choice)
    assert bool(found.info.choice) == bool(choice)
    assert found.info.choice in found.summary
    assert f"profile {profile}, " in found.summary
    assert found.info.accumulation == "fp32"
    assert len(opened) == in_memory() == 1


def test_the_environment_variable_for_the_kernel_path_affects_the_choice(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is real here, and the test passes on any processor."""
    found = loaded(converted)
    assert found.info.profile == BOTH[kernel.multiplies_bf16()]
    assert ("was skipped, bf16 would be emulated here" in found.info.choice) == (not kernel.multiplies_bf16())
    monkeypatch.setenv(kernel.VARIABLE, "portable")
    assert loaded(converted).info.choice == "auto: cpu-bf16 was skipped, bf16 would be emulated here"
    monkeypatch.setenv(kernel.VARIABLE, "off")
    assert loaded(converted).info.profile == "cpu"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BudgetExceeded("golden samples are over the drift budget: y"), "golden samples are over the drift budget: y"),
        (RuntimeFailure("secret"), "it does not run here (the log says why)"),
    ],
)
def test_a_profile_that_fails_the_golden_gate_is_skipped_and_the_model_serves(
    error: Bf16kitError,
    said: str,
    converted: Path,
    native: Native,
    opened: list[Any],
    in_memory: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    native(True)
    check = goldengate.check_golden

    def judged(*given: Any) -> str:
        if opened[-1].info.profile == "cpu-bf16":
            raise error
        return check(*given)

    monkeypatch.setattr(loading, "check_golden", judged)
    with caplog.at_level(logging.WARNING):
        found = loaded(converted)
    assert (found.info.profile, found.info.choice) == ("cpu", f"auto: cpu-bf16 was skipped, {said}")
    assert ("secret" in caplog.text) == isinstance(error, RuntimeFailure)
    assert in_memory() == 1


def test_a_named_profile_that_is_missing_or_not_for_the_device_is_an_error(converted: Path) -> None:
    with pytest.raises(ArtifactError, match="has no profile 'torchscript'; it has cpu, cpu-bf16, cuda"):
        loaded(converted, profile="torchscript")
    with pytest.raises(ConfigError, match="profile cpu-bf16 runs on the CPU, not on cuda:0"):
        loading.load(converted, Serving(profile="cpu-bf16"), device="cuda:0", threads=1)


def test_a_profile_that_accumulates_in_bf16_is_rejected(
    converted: Path, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe finds bf16 accumulation for the profile cpu-bf16 only, and the profile cpu serves."""
    native(True)
    monkeypatch.setattr(
        "bf16kit.runtime.ort.onnx.probe_onnx", lambda _d, precision, _l: {"bf16": "bf16"}.get(precision, "fp32")
    )
    with pytest.raises(RuntimeFailure, match="the accumulation probe found bf16 here; use profile cpu"):
        loaded(converted, profile="cpu-bf16")
    assert loaded(converted).info.profile == "cpu"


@pytest.mark.long
def test_bench_measures_every_profile_that_may_serve_and_suggests_one(converted: Path, native: Native) -> None:
    native(True)
    asked = ["bench", "m", "--repository", str(converted.parent.parent), "--device", "cpu", "--seconds", "1", "--json"]
    with restored_log():
        done = CliRunner().invoke(main, [*asked, "--rows", "1"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["skipped"] == []
    assert {row["profile"] for row in found["steps"]["profile"]} == set(BOTH)
    assert found["suggested"]["profile"] in BOTH


def test_log_model_config_metric_and_page_name_the_profile_and_the_reason(
    converted: Path, tmp_path: Path, serve: Serve
) -> None:
    """Serve two models; the serving.yaml of one names its profile."""
    for name in ("chosen", "named"):
        shutil.copytree(converted, tmp_path / name / "1")
    (tmp_path / "named" / "serving.yaml").write_text("profile: cpu-bf16\nshadow: {rate: 0}\n")
    server = serve("--repository", tmp_path, "--device", "cpu").wait_ready()
    golden = Artifact.open(converted).golden()
    told: dict[str, dict[str, str]] = {}
    for name in ("chosen", "named"):
        np.testing.assert_allclose(server.infer(name, golden.inputs)["y"], golden.outputs["y"], atol=0.05)
        # tritonclient's ModelMetadata has no properties; the configuration's parameters have the same values
        with triton.InferenceServerClient(server.target) as client:
            found = client.get_model_config(name).config.parameters
        told[name] = {key: value.string_value for key, value in found.items()}
    assert (told["named"]["profile"], told["named"]["choice"]) == ("cpu-bf16", "")
    assert told["chosen"]["profile"] in BOTH
    assert told["chosen"]["choice"].startswith("auto: ")
    assert told["chosen"]["choice"] in server.log
    shown = [model["running"] for model in json.loads(server.get("/status.json")[1])["models"]]
    assert [(each["profile"], each["choice"]) for each in shown] == [
        (told[name]["profile"], told[name]["choice"]) for name in ("chosen", "named")
    ]
    labels = 'accumulation="fp32",backend="onnxruntime",device="cpu",model="named",precision="bf16",profile="cpu-bf16"'
    assert server.metric(f'bf16kit_model_info{{{labels},version="1"}}') == 1
    drift = Artifact.open(converted).manifest.drift["cpu-bf16"].outputs["y"]["relative_l2"]["mean"]
    assert server.of_model("drift_baseline", "named", metric="relative_l2", output="y") == drift
