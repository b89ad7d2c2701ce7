"""Exports a torch module to an fp32 ONNX graph whose weights are views of the checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from bf16kit.converter.graph.dimensions import SIZES
from bf16kit.converter.graph.equality import OTHER_FLOATS
from bf16kit.converter.process.quiet import first_line, innermost, quiet, user_frame
from bf16kit.converter.read.branches import size_conditions
from bf16kit.converter.read.simplify import bind, simplify
from bf16kit.converter.read.sources import parameters_of
from bf16kit.converter.read.statedict import to_torch
from bf16kit.converter.read.translations import TRANSLATIONS, PoolsOfAnyLength
from bf16kit.converter.source import CHANGED, Array, Feeds, TorchModel
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import TensorSpec, describe

OPSET = 22  # the first opset with bf16 Conv; ONNX Runtime accepts up to 26
_BATCH, _STEP = 2, 5  # sizes of free dimensions in the example: all different, and never 0 or 1
_HALVED = 32  # sizes are multiples of it in the second example, for networks that halve an image five times
_FIXED = re.compile(r"static shape of (\d+) for dimension inputs\['tensors'\]\[(\d+)\]\.shape\[(\d+)\]")
Call = Callable[[torch.nn.Module, dict[str, torch.Tensor]], Any]
Examples = Callable[[Sequence[TensorSpec]], Sequence[Feeds]]


class Untranslatable(ConversionError):
    """ONNX cannot express what a module computes; other formats may be able to."""


def adapt(
    module: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    *,
    call: Call | None = None,
    example: Feeds | None = None,
    examples: Examples | None = None,
) -> TorchModel:
    """Wrap ``module``, in evaluation mode, to take positional inputs, and run it once to find its outputs' names.

    ``call`` says how to call it if not with the inputs alone. ``example`` holds the inputs of that run; the default is
    ones and zeros of small sizes; where it does not run on these, ones of larger sizes, and last what ``examples``
    returns. ConversionError if it runs on none.
    """
    wrapped = Positional(module.eval(), [spec.name for spec in inputs], call).eval()
    failures = list[ConversionError]()
    for tensors in _examples(inputs, examples) if example is None else (_tensors(example, inputs),):
        try:
            with quiet(), torch.no_grad():
                result = wrapped.call(*tensors)
        except Exception as error:  # noqa: BLE001 - the user's model may raise anything
            shapes = ", ".join(f"{s.name}{list(t.shape)}" for s, t in zip(inputs, tensors, strict=True))
            text = f"the model failed on an example input ({shapes}): {first_line(error)}"
            failures.append(ConversionError(text + _remedy(inputs, given=example is not None or examples is not None)))
        else:
            names = output_names(result, [spec.name for spec in inputs])
            return TorchModel(wrapped, tuple(inputs), names, tensors, left_out(result))
    raise failures[0 if examples is None else -1]


def _remedy(inputs: Sequence[TensorSpec], *, given: bool) -> str:
    narrow = next((spec.name for spec in inputs if spec.dtype in OTHER_FLOATS), None)
    if narrow is not None:
        return f"; a module is converted in fp32: give {narrow} as float32, unless the module casts it itself"
    return "" if given else "; if it needs other sizes or values, give --samples: one of them is then the example"


def not_served(outputs: Sequence[str], left_out: Sequence[str], remedy: str = "") -> list[str]:
    """Return a note on what a model computes besides its ``outputs``; ``remedy`` says how to get it."""
    if not left_out:
        return []
    note = f"served: {', '.join(outputs)}; not served, though the model computes it: {', '.join(left_out)}"
    return [f"{note}; {remedy}" if remedy else note]


def to_onnx(model: TorchModel, tensors: Mapping[str, Array]) -> ir.Model:
    """Return the module as an fp32 graph at opset 22.

    An initializer with the bytes of one of ``tensors``, or of its transpose, becomes a view of it and takes its name,
    so that the module's own memory can be freed. Raises :class:`Untranslatable` when torch's exporter fails.
    """
    # Free dimensions by name; the exporter finds their relations, and rejects one that is not free.
    shapes = tuple({i: dim for i, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in model.inputs)
    for recurrence in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input):
        # An export leaves torch's unrolling of steps here, and the next one would take it: their number would be fixed.
        recurrence._dispatch_cache.clear()
    try:
        with quiet(), torch.no_grad(), PoolsOfAnyLength():
            program = torch.onnx.export(
                model.module,
                model.example,
                dynamo=True,
                opset_version=OPSET,
                input_names=[spec.name for spec in model.inputs],
                output_names=list(model.outputs),
                dynamic_shapes=(shapes,) if any(shapes) else None,
                custom_translation_table=TRANSLATIONS,
                optimize=False,  # `simplify` instead, which does not change weights
                verbose=False,
            )
    except Exception as error:  # the exporter raises errors of any kind
        cause = innermost(error)
        if fixed := _FIXED.search(str(cause)):
            size, place, axis = map(int, fixed.groups())
            what = f"dimension {axis} of {model.inputs[place].name}{describe(model.inputs[place].shape)}"
            raise Untranslatable(
                f"torch.onnx.export fixes {what} at the example's size, {size}; for ONNX, declare that dimension as the"
                " number that it is"
            ) from error
        why = first_line(cause) + user_frame(cause, packages=False)
        raise Untranslatable(f"torch.onnx.export cannot translate the model: {why}") from error
    if program is None or program.exported_program is None:
        raise ConversionError("torch.onnx.export returned no program")
    graph: ir.Model = program.model
    with quiet():
        simplify(graph)
    known = {
        SIZES: size_conditions(program.exported_program, model.inputs),
        CHANGED: list(program.exported_program.graph_signature.buffers_to_mutate.values()),
    }
    for value, spec in zip(graph.graph.inputs, model.inputs, strict=True):
        value.name, value.shape = spec.name, ir.Shape(spec.shape)
    bind(graph, tensors)
    found = graph.clone()  # drops what the steps above removed, which the exporter's values still refer to
    found.meta.update(known)
    return found


def _examples(inputs: Sequence[TensorSpec], examples: Examples | None) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield examples to try: small ones, with zeros for indices, larger ones, and ``examples``.

    Named dimensions differ in size: equal ones could be taken for the same.
    """
    names = dict.fromkeys(dim for spec in inputs for dim in spec.shape if isinstance(dim, str))
    small = {name: _BATCH + index * _STEP for index, name in enumerate(names)}
    yield _plain(inputs, small, torch.zeros)  # 0 is a valid index into every table
    rows = {spec.shape[0] for spec in inputs if spec.shape}
    large = {name: small[name] if name in rows else (index + 1) * _HALVED for index, name in enumerate(names)}
    yield _plain(inputs, large, torch.ones)  # 1 is a valid length
    if examples is not None:
        yield from (_tensors(feeds, inputs) for feeds in examples(inputs))


def _plain(
    inputs: Sequence[TensorSpec], sizes: Mapping[str, int], indices: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    found = []
    for spec in inputs:
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        dtype = getattr(torch, spec.dtype)
        is_index = not (dtype.is_floating_point or dtype is torch.bool or "mask" in spec.name)
        try:
            found.append((indices if is_index else torch.ones)(shape, dtype=dtype))
        except RuntimeError as error:  # torch's error for "out of memory"
            what = f"{spec.name}{describe(spec.shape)}"
            raise ConversionError(f"an example input cannot be made ({what}): {first_line(error)}") from error
    return tuple(found)


def _tensors(feeds: Feeds, inputs: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
    return tuple(to_torch(feeds[spec.name]) for spec in inputs)


class Positional(torch.nn.Module):
    """Calls ``module`` by keyword if its ``forward`` has parameters with all the ``names``, else by position.

    ``call`` replaces that: it gets the module and its inputs by name.
    """

    def __init__(self, module: torch.nn.Module, names: Sequence[str], call: Call | None = None) -> None:
        super().__init__()
        self.module = module
        self.names = list(names)
        self._call = call
        self._by_keyword = call is None and set(names) <= set(parameters_of(module)[0])

    def call(self, *tensors: torch.Tensor) -> Any:
        """Return whatever ``module`` returns."""
        feeds = dict(zip(self.names, tensors, strict=True))
        if self._call is not None:
            return self._call(self.module, feeds)
        return self.module(**feeds) if self._by_keyword else self.module(*tensors)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given: list[torch.Tensor] = list(tensors)
        for _, tensor in named_tensors(self.call(*tensors)):
            # A graph has one value per tensor: a second name for an output, or an input's tensor as output, would be
            # lost.
            given.append(tensor.clone() if any(tensor is other for other in given) else tensor)
        return tuple(given[len(tensors) :])


def output_names(result: Any, inputs: Sequence[str] = ()) -> tuple[str, ...]:
    """Return names for the tensors in a module's result, in its order.

    They are a mapping's keys or a named tuple's fields. Otherwise a single tensor is ``output`` and several are
    ``output_0`` …; nested parts are joined by dots: ``hidden.0``, ``scores.logits``. An output with the name of one of
    the ``inputs`` gets the suffix ``_out``, because names in a graph are unique. Raises :class:`ConversionError` for a
    result without tensors, and for two outputs of the same name.
    """
    names = [f"{name}_out" if name in inputs else name for name, _ in named_tensors(result)]
    if not names:
        raise _no_tensor(result)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConversionError(f"two of the model's outputs are named {twice!r}; rename a key of what forward returns")
    return tuple(names)


def _no_tensor(result: Any) -> ConversionError:
    return ConversionError(f"the model returned {type(result).__name__} without a tensor in it")


def left_out(result: Any) -> tuple[str, ...]:
    """Return what of a transformers output is not served: caches, lists with an entry per layer, duplicates."""
    return tuple(_model_output(result)[1]) if _is_model_output(result) else ()


def named_tensors(result: Any) -> list[tuple[str, torch.Tensor]]:
    """Return every tensor in ``result`` with its name."""
    if _is_model_output(result):
        return _model_output(result)[0]
    parts = {"output": result} if isinstance(result, torch.Tensor) else _parts(result)
    if parts is None:
        raise _no_tensor(result)
    if isinstance(result, list | tuple) and not hasattr(result, "_asdict"):
        single = len(parts) == 1 and isinstance(next(iter(parts.values())), torch.Tensor)
        parts = {"output" if single else f"output_{index}": part for index, part in parts.items()}
    found = [leaf for name, part in parts.items() for leaf in _leaves(str(name), part)]
    for name, value in found:
        if not isinstance(value, torch.Tensor):
            raise ConversionError(
                f"the model's output {name!r} is a {type(value).__name__}, which a graph cannot return; let forward"
                " return tensors, or mappings and sequences of them"
            )
        if value.is_complex():  # the exporter would append an axis for the two parts
            dtype = str(value.dtype).removeprefix("torch.")
            raise ConversionError(f"output {name!r} is {dtype}, which is not served; return torch.view_as_real of it")
    return found


def _model_output(result: Any) -> tuple[list[tuple[str, torch.Tensor]], list[str]]:
    """Return the tensors of a transformers output and those in it, by name, and the names of what is left out."""
    kept: dict[int, tuple[str, torch.Tensor]] = {}
    missing = []
    fields = [field for name, part in _parts(result).items() for field in _leaves(name, part, _is_model_output)]
    for name, value in sorted(fields, key=lambda field: "." in field[0]):  # outer names first, which nested ones repeat
        if isinstance(value, torch.Tensor):
            same, _ = kept.setdefault(id(value), (name, value))
            missing += [f"{name} (the same tensor as {same})"] if same != name else []
        elif not (isinstance(value, tuple | list) and not value):
            missing.append(name)
    return list(kept.values()), missing


def _leaves(name: str, value: Any, opens: Callable[[Any], bool] = lambda _: True) -> Iterator[tuple[str, Any]]:
    """Yield what is in ``value`` and the containers in it that it ``opens``, with names joined by dots."""
    parts = None if isinstance(value, torch.Tensor) or not opens(value) else _parts(value)
    if parts is None:
        yield name, value
    for key, part in (parts or {}).items():
        yield from _leaves(f"{name}.{key}", part, opens)


def _parts(value: Any) -> Any:
    """Return the parts of ``value`` by key, field or number, without those that are None; None for no container."""
    if hasattr(value, "_asdict"):  # a named tuple
        value = value._asdict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, Mapping | type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, list | tuple):
        value = dict(enumerate(part for part in value if part is not None))
    return {key: part for key, part in value.items() if part is not None} if isinstance(value, Mapping) else None


def _is_model_output(result: Any) -> bool:
    return any(base.__name__ == "ModelOutput" for base in type(result).__mro__)
