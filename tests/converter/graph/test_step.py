from __future__ import annotations

import onnx_ir as ir
import pytest

import graphs
from bf16kit.messages.errors import ConversionError
from converter.graph.step import Step, run


class _Failing(Step):
    """A step that changes the graph's name, and fails where it is told to."""

    name = "break"

    def __init__(self, where: str = "", error: Exception | None = None) -> None:
        super().__init__()
        self._where, self._error = where, error

    def _fail(self, where: str) -> None:
        if where == self._where and self._error is not None:
            raise self._error

    def requires(self, model: ir.Model) -> None:
        self._fail("before")

    def apply(self, model: ir.Model) -> bool:
        self._fail("in")
        model.graph.name = "renamed"
        return True

    def ensures(self, model: ir.Model) -> None:
        self._fail("after")


class _Rename(_Failing):
    name = "rename"


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        ("before", ConversionError("no moon"), "step 'break' cannot start (after rename): no moon"),
        ("after", ConversionError("a loose node"), "step 'break' left its work undone (after rename): a loose node"),
        ("in", KeyError("weight"), "step 'break' (after rename): KeyError: 'weight'"),
    ],
)
def test_an_error_names_the_step_the_steps_before_it_and_the_cause(where: str, error: Exception, text: str) -> None:
    model = ir.from_proto(graphs.mlp())
    assert run([_Rename()], model) is model
    with pytest.raises(ConversionError) as caught:
        run([_Rename(), _Failing(where, error)], model)
    assert str(caught.value) == text
    assert model.graph.name == "renamed"
