from __future__ import annotations

import onnx_ir as ir
import pytest

import graphs
from bf16kit.messages.errors import ConversionError
from converter.graph.step import Step, run


class _Rename(Step):
    name = "rename"

    def apply(self, model: ir.Model) -> bool:
        model.graph.name = "renamed"
        return True


class _Needy(_Rename):
    name = "be needy"

    def requires(self, model: ir.Model) -> None:
        raise ConversionError("the moon is not full")


class _Careless(_Rename):
    name = "be careless"

    def ensures(self, model: ir.Model) -> None:
        raise ConversionError("three nodes are loose")


class _Broken(_Rename):
    name = "break"

    def apply(self, model: ir.Model) -> bool:
        raise KeyError("weight")


def _model() -> ir.Model:
    return ir.from_proto(graphs.mlp())


def test_steps_run_in_order_on_the_same_model() -> None:
    model = _model()
    assert run([_Rename()], model) is model
    assert model.graph.name == "renamed"


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (_Needy(), "step 'be needy' cannot start (after rename): the moon is not full"),
        (_Careless(), "step 'be careless' left its work undone (after rename): three nodes are loose"),
        (_Broken(), "step 'break' (after rename): KeyError: 'weight'"),
    ],
)
def test_an_error_names_the_step_the_steps_before_it_and_the_cause(step: Step, text: str) -> None:
    with pytest.raises(ConversionError) as caught:
        run([_Rename(), step], _model())
    assert str(caught.value) == text
