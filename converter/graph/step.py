"""The base of conversion steps, and the function that runs a list of them.

A step is an in-place pass over an ONNX graph that states what it ``requires`` before and ``ensures`` after. An error
names the step and the steps before it, so that a bug report tells where the graph became invalid.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import onnx_ir as ir

from bf16kit.messages.errors import ConversionError
from bf16kit.messages.wording import brief


class Step(ir.passes.InPlacePass):
    """One step: ``name`` says what it does in a few words; ``apply`` changes the model and returns whether it did."""

    name: str

    @abstractmethod
    def apply(self, model: ir.Model) -> bool: ...

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, modified=self.apply(model))


def run(steps: Sequence[Step], model: ir.Model) -> ir.Model:
    """Run ``steps`` in order on ``model``, in place, and return it.

    Raises :class:`ConversionError` that names the step that failed, the steps before it, and the cause.
    """
    for done, step in enumerate(steps):
        try:
            step(model)
        except Exception as error:
            raise ConversionError(_failure(step, steps[:done], error)) from error
    return model


def _failure(step: Step, before: Sequence[Step], error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, ir.passes.InvariantError) and error.__cause__ else error
    text = brief(cause if isinstance(cause, ConversionError) else f"{type(cause).__name__}: {cause}")
    when = ""
    if isinstance(error, ir.passes.PreconditionError):
        when = " cannot start"
    elif isinstance(error, ir.passes.PostconditionError):
        when = " left its work undone"
    after = f" (after {', '.join(s.name for s in before)})" if before else ""
    return f"step '{step.name}'{when}{after}: {text}"
