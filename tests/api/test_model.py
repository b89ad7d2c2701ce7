"""``bf16kit.load`` and ``bf16kit.compare``."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import Mlp

import bf16kit
import graphs
from bf16kit.numerics.tensors import Array


@pytest.fixture(scope="module")
def model(converted: bf16kit.Conversion) -> bf16kit.Model:
    return bf16kit.load(converted.path, profile="cpu")


def test_a_model_takes_numpy_and_torch_by_position_by_name_and_as_a_mapping(model: bf16kit.Model, x: Array) -> None:
    expected = model(x)
    assert (list(expected), expected["output"].shape, str(expected["output"].dtype)) == (
        ["output"],
        (128, 10),
        "float32",
    )
    tensor = torch.from_numpy(x).requires_grad_()
    for answer in (
        model(x=x),
        model({"x": x}),
        model(tensor),
        model(x=tensor),
        model(x.tolist()),
        model(x[:, ::-1][:, ::-1]),
    ):
        assert np.array_equal(answer["output"], expected["output"])
    assert (model.profile, model.info.accumulation) == ("cpu", "fp32")
    assert [(each.name, each.shape) for each in (*model.inputs, *model.outputs)] == [
        ("x", ("batch", 16)),
        ("output", ("batch", 10)),
    ]
    assert "x float32[batch,16] → output float32[batch,10]" in repr(model)


def test_a_model_without_inputs_takes_an_empty_mapping(tmp_path: Path) -> None:
    source = graphs.parsed(
        "() => (float[16, 32] y) { y = MatMul (a, w) }", a=graphs.values(16, 16), w=graphs.values(16, 32)
    )
    made = bf16kit.convert(source, out=tmp_path / "m" / "1", samples=[{}], report=False)
    with bf16kit.load(made.path) as model:
        assert np.array_equal(model({})["y"], model()["y"])
        with pytest.raises(bf16kit.InvalidRequest, match="1 inputs are given; the model's inputs are none"):
            model(1)


@pytest.mark.parametrize(
    ("arguments", "named", "said"),
    [
        ((np.zeros((2, 17), np.float32),), {}, "[2, 17]"),
        ((np.zeros((2, 16)),), {}, "has dtype float64, expected float32"),
        ((), {"y": 1}, "unknown input 'y'; the model's inputs are x"),
        ((), {}, "input 'x' is missing"),
        ((1, 2), {}, "2 inputs are given; the model's inputs are x"),
        (("text",), {}, "input 'x' is not an array: ValueError"),
        (([[1.0], [1.0, 2.0]],), {}, "input 'x' is not an array: ValueError"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    model: bf16kit.Model, arguments: tuple[Any, ...], named: dict[str, Any], said: str
) -> None:
    with pytest.raises(bf16kit.InvalidRequest) as refused:
        model(*arguments, **named)
    assert said in str(refused.value)


def test_a_model_is_loaded_as_a_server_loads_it(converted: bf16kit.Conversion, tmp_path: Path, x: Array) -> None:
    shutil.copytree(converted.path.parent, tmp_path / "mlp")
    path = tmp_path / "mlp" / "1"
    with bf16kit.load(path) as chosen:
        assert chosen.profile in ("cpu", "cpu-bf16")
    with pytest.raises(bf16kit.ArtifactError, match="no profile 'pt2'; it has"):
        bf16kit.load(path, profile="pt2")
    (tmp_path / "mlp" / "serving.yaml").write_text("budget: {relative_l2: 1.0e-9}\n")
    with pytest.raises(bf16kit.BudgetExceeded, match="golden samples are over the drift budget"):
        bf16kit.load(path, profile="cpu")
    weights = bytearray((path / "weights.bf16").read_bytes())
    weights[7] ^= 1
    (path / "weights.bf16").write_bytes(weights)
    with pytest.raises(bf16kit.ArtifactError, match=r"weights\.bf16"):
        bf16kit.load(path)


def test_the_drift_from_the_source_is_that_of_the_conversion(
    model: bf16kit.Model, converted: bf16kit.Conversion, net: Mlp, x: Array
) -> None:
    source = torch.nn.Sequential(net, torch.nn.Dropout(0.5)).train()  # which answers at random in training mode
    net.up.eval()
    found = bf16kit.compare(model, source, x)
    assert found.within
    assert found["cpu"]["output"].keys() == converted.drift["cpu"]["output"].keys()
    for metric in ("relative_l2", "max_abs", "top1_agreement"):
        assert found["cpu"]["output"][metric] == pytest.approx(converted.drift["cpu"]["output"][metric], rel=1e-2)
    assert [each.training for each in source.modules()] == [True, True, False, True, True]


@pytest.mark.parametrize(
    "answers", [lambda y: {"output": y}, lambda y: (y,), torch.from_numpy, lambda y: {"a": y, "output": y}]
)
def test_a_reference_is_any_function(model: bf16kit.Model, x: Array, answers: Any) -> None:
    assert (
        bf16kit.compare(model, lambda given: answers(model(given)["output"]), [x[:3], x])["cpu"]["output"]["max_abs"]
        == 0
    )
    over = bf16kit.compare(model, lambda given: answers(1.05 * model(given)["output"]), x).over
    assert {row.metric for row in over} >= {"relative_l2"}
    widened = bf16kit.compare(
        model, lambda given: answers(1.05 * model(given)["output"]), x, budget={row.metric: None for row in over}
    )
    assert widened.within


def test_a_reference_that_cannot_be_compared_with_is_refused(model: bf16kit.Model, x: Array) -> None:
    for reference, said in (
        (lambda given: np.full((len(given), 10), np.nan, np.float32), "gives NaN for sample 0"),
        (lambda given: {"other": given}, "the reference returned no output 'output'; it returned other"),
        (lambda given: given[:, :3], "the reference returned output[128,3], the model's is [128,10]"),
        (lambda given: None, "the reference returned output[], the model's is [128,10]"),
        (lambda given: given[1:, :10], "the reference returned output[127,10], the model's is [128,10]"),
        (lambda given: (), "the reference returned output[0], the model's is [128,10]"),
    ):
        with pytest.raises(bf16kit.UsageError) as refused:
            bf16kit.compare(model, reference, x)
        assert said in str(refused.value)
