"""Exporting a torch module to a graph: names, memory, free dimensions, and no folding that `restore` cannot undo."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
import torch
from architectures import Mlp, ModelOutput, Several, Tied, seeded
from lowered import run_exported
from numpy.typing import NDArray
from torch import nn

import graphs
from bf16kit.converter.graph.dimensions import SIZES
from bf16kit.converter.graph.initializers import ComputedTensor
from bf16kit.converter.read import simplify
from bf16kit.converter.read.onnx_export import Untranslatable, adapt, to_onnx
from bf16kit.converter.read.sources import kind_of, measured_outputs, output_specs
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import TensorSpec

X = (TensorSpec("x", "float32", ("batch", 16)),)
IDS = (TensorSpec("ids", "int64", ("batch", "seq")),)


def tensors(module: nn.Module) -> dict[str, NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(
    ("make", "inputs", "names"),
    [(Mlp, X, ["up.weight", "down.weight"]), (Tied, IDS, ["table.weight", "inner.weight"])],
)
def test_weights_are_views_of_the_checkpoint_under_its_names_transposed_or_not(
    make: type[nn.Module], inputs: tuple[TensorSpec, ...], names: list[str]
) -> None:
    """Linear over more than two dimensions, as in Tied, becomes a MatMul with the weight transposed."""
    module = seeded(make())
    checkpoint = {name: array.copy() for name, array in tensors(module).items()}
    found = to_onnx(adapt(module, inputs), checkpoint).graph.initializers
    for name in names:
        assert np.shares_memory(found[name].const_value.numpy(), checkpoint[name])  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_weights_of_another_precision_are_computed_when_they_are_read(dtype: Any) -> None:
    """Copies of all weights in fp32 would be as large as the model."""
    checkpoint = {name: array.astype(dtype) for name, array in tensors(seeded(Mlp())).items()}
    module = seeded(Mlp())
    module.load_state_dict({name: torch.from_numpy(array) for name, array in checkpoint.items()})
    found = to_onnx(adapt(module, X), checkpoint).graph.initializers
    for name in ("up.weight", "down.weight"):
        tensor = found[name].const_value
        assert isinstance(tensor, ComputedTensor)
        np.testing.assert_array_equal(tensor.numpy(), checkpoint[name].astype(np.float32))


def test_module_and_graph_can_be_freed_once_they_are_used() -> None:
    """Nothing in the graph is the module's memory, though rewrite rules keep the last graph that they saw."""
    module = seeded(Mlp())
    checkpoint = {name: array.copy() for name, array in tensors(module).items()}
    model = adapt(module, X)
    graph = to_onnx(model, checkpoint)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    for name, value in graph.graph.initializers.items():
        assert np.array_equal(value.const_value.numpy(), checkpoint[name])  # type: ignore[union-attr]
    alive = weakref.ref(module), weakref.ref(graph.graph)
    del module, model, graph, value
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_batch_norm_is_left_for_the_conversion_to_fold_and_dropout_is_left_out() -> None:
    """The exporter's own optimiser would fold it and lose the scale, and thus the checkpoint's weight."""
    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.BatchNorm1d(16)).train()
    graph = to_onnx(adapt(module, X), tensors(module))
    assert {node.op_type for node in graph.graph} == {"Gemm", "BatchNormalization"}


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("label", "int64", "logits"),
        ("is_fraud", "bool", "logits"),
        ("boxes", "int64", "other"),
        ("scores", "uint8", "other"),  # numbers, of which an error of one leaves most close
        ("class_embedding", "float32", "embedding"),
    ],
)
def test_booleans_and_integers_called_labels_are_judged_as_labels(name: str, dtype: str, kind: str) -> None:
    assert kind_of(name, dtype) == kind


@pytest.mark.parametrize("names", ["ab", "xy"])
def test_inputs_are_passed_by_keyword_if_the_model_knows_their_names(names: str) -> None:
    """A mapping gives the outputs their names, and names give their kind."""
    a, b = TensorSpec(names[0], "float32", ("batch", 16)), TensorSpec(names[1], "float32", ("batch", 8))
    module = seeded(Several())
    specs = output_specs(to_onnx(adapt(module, (b, a) if names == "ab" else (a, b)), tensors(module)))
    assert [(spec.name, spec.kind) for spec in specs] == [("scores", "logits"), ("embedding", "embedding")]


class Parameter(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.randn(16, 32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.get_parameter(self.name)


@pytest.mark.parametrize("name", ["x", "matmul", "module"])
def test_a_parameter_may_have_the_name_of_any_other_value(name: str) -> None:
    """The values, inputs and outputs of a graph share one namespace; a module's parameters have another."""
    module = seeded(Parameter(name))
    graph = to_onnx(adapt(module, X), tensors(module))
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    expected = x @ module.get_parameter(name).detach().numpy()
    np.testing.assert_allclose(run_exported(graph, X, x=x)["output"], expected, rtol=1e-5, atol=1e-5)


class Recurrent(NamedTuple):
    out: torch.Tensor
    state: tuple[torch.Tensor, torch.Tensor]


def two_heads(_module: nn.Module, x: torch.Tensor) -> Any:
    return {"logits": x, "embeddings": x + 1, "extra": None}


def nested(_module: nn.Module, x: torch.Tensor) -> Any:
    return {"h": (x, [x + 1]), "out": {"logits": x + 2}}


def named(_module: nn.Module, x: torch.Tensor) -> Any:
    return Recurrent(x, (x + 1, x + 2))


class Answering(nn.Module):
    """Returns what ``answer`` computes from an LSTM and its input."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer, self.layer = answer, nn.LSTM(16, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.answer(self.layer, x)


def twice(layer: nn.LSTM, x: torch.Tensor) -> Any:
    y = torch.tanh(x)
    return {"a": y, "b": y, "x": x, "weight": layer.weight_ih_l0}


def of_parts(layer: nn.LSTM, x: torch.Tensor) -> Any:
    states, cache = layer(x.unsqueeze(1))
    logits = states.sum(1)
    text = ModelOutput(hidden_states=(x, x), state=torch.tanh(logits), none=None, logits=logits)
    return ModelOutput(text=text, logits=logits, again=logits, cache=cache)


def test_parts_of_a_transformers_output_that_are_not_served_are_named() -> None:
    model = adapt(seeded(Answering(of_parts)), X)
    assert model.outputs == ("logits", "text.state")
    same = "(the same tensor as logits)"
    assert model.left_out == (f"again {same}", "cache", "text.hidden_states", f"text.logits {same}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (lambda layer, x: layer(x[:, None]), ("output_0", "output_1.0", "output_1.1")),
        (two_heads, ("logits", "embeddings")),
        (nested, ("h.0", "h.1.0", "out.logits")),
        (named, ("out", "state.0", "state.1")),
        (twice, ("a", "b", "x_out", "weight")),  # names in a graph are unique
    ],
)
def test_nested_outputs_keep_their_parts(answer: Any, names: tuple[str, ...]) -> None:
    module = seeded(Answering(answer))
    model = adapt(module, X)
    assert model.outputs == names
    graph = to_onnx(model, tensors(module))
    assert tuple(spec.name for spec in output_specs(graph)) == names
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    with torch.no_grad():
        expected = model.module(torch.from_numpy(x))
    for tensor, found in zip(expected, run_exported(graph, X, x=x).values(), strict=True):
        np.testing.assert_allclose(found, tensor.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda *_: 3, "returned int without a tensor"),
        (lambda _, x: {"logits": x, "state": object()}, "output 'state' is a object, which a graph cannot return"),
        (lambda _, x: (x, (x, 3)), r"output 'output_1\.1' is a int"),
        (lambda _, x: {"h": (x, x), "h.0": x}, r"two of the model's outputs are named 'h\.0'"),
    ],
)
def test_an_output_that_a_graph_cannot_return_is_rejected_by_name(answer: Any, said: str) -> None:
    with pytest.raises(ConversionError, match=said):
        adapt(Answering(answer), X)


_EDGE = TensorSpec("x", "float32", ("batch", "seq", 4))


def _shown(function: Callable[[torch.Tensor], torch.Tensor]) -> TensorSpec:
    (spec,) = measured_outputs(adapt(Answering(lambda _, x: function(x)), (_EDGE,)))
    return spec


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.transpose(0, 1), ("seq", "batch", 4)),
        (lambda x: x.sum((0, 1)), (4,)),
        (lambda x: x.flatten(0, 1), ("output_0", 4)),
        (lambda x: torch.cat([x, x], 1), ("batch", "output_1", 4)),
        (lambda x: x.reshape(2, 7, 4), ("batch", "seq", 4)),  # fails at other sizes: the first run decides
    ],
)
def test_free_dimensions_have_the_names_of_the_input_dimensions_they_follow_or_their_own(
    function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int | str, ...]
) -> None:
    assert _shown(function).shape == shape


def test_dtypes_are_those_that_are_served_and_ranks_and_numbers_do_not_depend_on_sizes() -> None:
    assert _shown(lambda x: x.argmax(2)).dtype == "int64"
    assert _shown(lambda x: x.bfloat16()).dtype == "float32"
    with pytest.raises(ConversionError, match=r"output 'output' is complex64.*torch\.view_as_real"):
        _shown(lambda x: torch.complex(x, x))
    with pytest.raises(ConversionError, match="has 3 dimensions for one input and 1 for another"):
        _shown(lambda x: x if x.shape[0] < 5 else x.flatten())
    with pytest.raises(ConversionError, match="returns 2 tensors for one input and 1 for another; let forward return"):
        measured_outputs(adapt(Answering(lambda _, x: x.split(3)), (_EDGE,)))


def test_no_constant_is_folded_into_a_larger_one() -> None:
    """Swin's table of relative positions [225, 2] times a weight [2, 512] would be 40 times what it is made from."""
    proto = graphs.parsed(
        """(float[batch, 225, 512] x) => (float[batch, 225, 512] y) {
            table = MatMul (positions, weight) bias = ReduceSum <keepdims = 0> (weight, first)
            sum = Add (x, table) y = Add (sum, bias)
        }""",
        positions=graphs.values(225, 2),
        weight=graphs.values(2, 512),
        first=np.array([0]),
    )
    model = ir.from_proto(proto)
    simplify.simplify(model)
    assert [node.op_type for node in model.graph] == ["MatMul", "Add", "Add"]
    assert sorted(value.shape.numpy() for value in model.graph.initializers.values() if value.shape) == [
        *((2, 512), (225, 2), (512,)),
    ]


def test_the_time_to_simplify_a_graph_does_not_grow_with_pairs_of_nodes() -> None:
    """A rule that matches two nodes at once tries every pair of nodes: 500 took 4 s."""
    steps = " ".join(f"v{index + 1} = Slice (v0, v{index}, end)" for index in range(1000))
    model = ir.from_proto(graphs.parsed(f"(int64[2] v0, int64[1] end) => (int64[2] v1000) {{ {steps} }}"))
    begun = time.process_time()
    simplify.simplify(model)
    assert time.process_time() - begun < 6


class _Halves(nn.Module):
    """x [batch, 1, h, w] → x beside its half, scaled up again; h and w must be even, as in a U-Net."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, nn.functional.interpolate(nn.functional.max_pool2d(x, 2), scale_factor=2.0)], 1)


def test_a_module_that_takes_even_sizes_only_is_exported_with_free_sizes() -> None:
    """The small example has odd sizes."""
    inputs = (TensorSpec("x", "float32", ("batch", 1, "h", "w")),)
    graph = to_onnx(adapt(_Halves(), inputs), {})
    x = graphs.values(3, 1, 10, 6)
    np.testing.assert_array_equal(run_exported(graph, inputs, x=x)["output"], _Halves()(torch.from_numpy(x)).numpy())


class _Filled(nn.Module):
    """x [batch, 1, h, w] → its maxima, after h is filled up to a multiple of four."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = x.shape[2] % 4
        x = nn.functional.pad(x, (0, 0, 0, 4 - rest)) if rest else x
        return nn.functional.max_pool2d(x if x.shape[0] == 1 else 1 * x, 4)


def test_the_sizes_for_which_a_graph_holds_are_told() -> None:
    """torch records more: what holds for all sizes or follows is left out, and that no size is 1, which it assumes."""
    graph = to_onnx(adapt(_Filled(), (TensorSpec("x", "float32", ("batch", 1, "h", "w")),)), {})
    wide, filled = graph.meta[SIZES]
    assert (wide.text, filled.text) == ("w >= 4", "(h % 4) != 0")
    for h, w in ((7, 12), (8, 12), (7, 3)):
        sizes = {"batch": 2, "h": h, "w": w}
        assert (wide.holds(sizes), filled.holds(sizes)) == (w >= 4, h % 4 != 0)


def test_a_table_of_positions_bounds_the_size_in_plain_words() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(12, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[: x.shape[1]]

    graph = to_onnx(adapt(Positions(), (TensorSpec("x", "float32", ("batch", "seq", 4)),)), {})
    assert [each.text for each in graph.meta[SIZES]] == ["seq <= 12"]


def test_chunks_of_a_free_dimension_are_exported() -> None:
    """onnxscript's evaluator raises at their SplitToSequence."""

    class Chunked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = torch.cat([x, -x], 1).chunk(2, 1)
            return a * b

    graph = to_onnx(adapt(Chunked().eval(), (TensorSpec("x", "float32", ("batch", "length", 8)),)), {})
    assert "SplitToSequence" in [node.op_type for node in graph.graph]


def test_what_torch_fixes_though_it_is_free_is_named_with_what_to_declare() -> None:
    model = adapt(nn.RNN(4, 8), (TensorSpec("x", "float32", ("steps", 3, 4)),))
    said = r"fixes dimension 0 of x\[steps,3,4\] at the example's size, 2; for ONNX, declare"
    with pytest.raises(Untranslatable, match=said):
        to_onnx(model, {})


def test_an_lstm_takes_any_number_of_steps_if_torch_does_not_fix_it() -> None:
    module = nn.Sequential(_States(), nn.Linear(8, 3)).eval()
    spec = (TensorSpec("x", "float32", ("batch", "steps", 4)),)
    for steps in (5, 11):
        x = graphs.values(2, steps, 4)
        found = run_exported(to_onnx(adapt(module, spec), {}), spec, x=x)["output"]
        np.testing.assert_allclose(found, module(torch.from_numpy(x)).detach().numpy(), atol=1e-5)


class _States(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.recurrent(x)[0]
