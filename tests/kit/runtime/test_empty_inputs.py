"""Inputs without elements: some operators of ONNX Runtime end the process, and so one request would end a server."""

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper

import graphs
from bf16kit.messages.errors import InputRefused
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.ort.onnx import OnnxRuntime

Shape = tuple[int, ...]

QUANTIZED = {"u": (1, 8, 32), "v": (8, 24), "b": (24,), "s": (1,), "z": (1,), "s0": (), "z0": ()}
# The operator as called, its weights (u, v and z are uint8), a shape of x that runs, and shapes that end the process.
ENDS: dict[str, tuple[str, dict[str, Shape], Shape, list[Shape]]] = {
    "ConvTranspose": ("ConvTranspose (x, w)", {"w": (2, 2, 3, 3, 3)}, (1, 2, 2, 2, 2), [(1, 2, 0, 2, 2)]),
    "DFT": ("DFT (x)", {}, (1, 4, 1), [(2, 0, 1)]),
    "DynamicQuantizeLSTM": (
        "com.microsoft.DynamicQuantizeLSTM <hidden_size = 8> (x, u, u, , , , , , s, z, s, z)",
        QUANTIZED,
        (4, 2, 8),
        [(4, 0, 8)],
    ),
    "Einsum": ('Einsum <equation = "bihd,bjhd->bhij"> (x, x)', {}, (2, 3, 2, 4), [(0, 3, 2, 4), (2, 0, 2, 4)]),
    "FeatureVectorizer": ("ai.onnx.ml.FeatureVectorizer <inputdimensions = [3, 3]> (x, x)", {}, (2, 3), [(0, 3)]),
    "GRU": ("GRU <hidden_size = 8> (x, w, w)", {"w": (1, 24, 8)}, (4, 2, 8), [(4, 0, 8), (0, 2, 8)]),
    "GridSample": ('GridSample <padding_mode = "border"> (x, w)', {"w": (1, 3, 3, 2)}, (1, 2, 4, 4), [(1, 2, 0, 4)]),
    "GroupQueryAttention": (
        "f = Flatten (x) a = ArgMax <axis = 1, keepdims = 0> (f) l = Cast <to = 6> (a) c = Constant <value_int = 1> ()"
        " t = Cast <to = 6> (c) y, k, v ="
        " com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1> (x, x, x, , , l, t)",
        {},
        (2, 1, 16),
        [(0, 1, 16)],
    ),
    "LSTM": ("LSTM <hidden_size = 8> (x, w, w)", {"w": (1, 32, 8)}, (4, 2, 8), [(4, 0, 8), (0, 2, 8)]),
    "MultiHeadAttention": (
        "com.microsoft.MultiHeadAttention <num_heads = 2> (x, x, x)",
        {},
        (2, 3, 8),
        [(0, 3, 8), (2, 0, 8)],
    ),
    "OneHot": (
        "a = Cast <to = 7> (x) d = Constant <value_int = 4> () o = Constant <value_floats = [0.0, 1.0]> ()"
        " y = OneHot (a, d, o)",
        {},
        (2, 3),
        [(2, 0), (0, 3)],
    ),
    "QAttention": (
        "q = Cast <to = 2> (x) y = com.microsoft.QAttention <num_heads = 2> (q, v, b, s0, s0, , z0, z0)",
        QUANTIZED,
        (2, 3, 8),
        [(0, 3, 8)],
    ),
    "SkipLayerNormalization": (
        "com.microsoft.SkipLayerNormalization (w, x, g)",
        {"w": (1, 3, 8), "g": (8,)},
        (1, 3, 8),
        [(0, 3, 8)],
    ),
    "SkipSimplifiedLayerNormalization": (
        "com.microsoft.SkipSimplifiedLayerNormalization (w, x, g)",
        {"w": (1, 3, 8), "g": (8,)},
        (1, 3, 8),
        [(0, 3, 8)],
    ),
    "TopK": ("k = Constant <value_ints = [1]> () y, place = TopK (x, k)", {}, (2, 3), [(0, 3)]),
    "Unique": ("Unique <axis = 0> (x)", {}, (2, 3), [(2, 0)]),
}


def zeros(shape: Shape, name: str = "x") -> NDArray[np.float32 | np.uint8]:
    return np.zeros(shape, np.uint8 if name[0] in "uvz" else np.float32)


def runtime(call: str, weights: dict[str, Shape], **ranks: int) -> OnnxRuntime:
    """Return the graph of one operator, with float inputs whose axes are all free."""
    specs = [TensorSpec(name, "float32", tuple(f"{name}{axis}" for axis in range(n))) for name, n in ranks.items()]
    inputs = ", ".join(f"float[{', '.join(map(str, spec.shape))}] {spec.name}" for spec in specs)
    nodes = call if call.find(" y") > 0 else f"y = {call}"
    arrays = {name: zeros(shape, name) for name, shape in weights.items() if name in call}
    model = graphs.parsed(f"({inputs}) => (float y) {{ {nodes} }}", **arrays)
    model.opset_import.extend([helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("ai.onnx.ml", 3)])
    return OnnxRuntime(model.SerializeToString(), specs, [TensorSpec("y", "float32", ())], threads=2)


@pytest.mark.parametrize("operator", ENDS)
def test_an_input_on_which_an_operator_would_end_the_process_is_refused(operator: str) -> None:
    call, weights, runs, ends = ENDS[operator]
    loaded = runtime(call, weights, x=len(runs))
    loaded.run({"x": zeros(runs)})
    for shape in ends:
        with pytest.raises(InputRefused, match=rf"with x \[.*0.*\], nothing is left for the model's {operator}$"):
            loaded.run({"x": zeros(shape)})


def test_no_rows_are_refused_but_not_an_empty_cache_of_keys() -> None:
    """The first step of a language model has one."""
    text = 'k = Concat <axis = 2> (past, x) y = Einsum <equation = "bhid,bhjd->bhij"> (x, k)'
    loaded = runtime(text, {}, x=4, past=4)
    assert loaded.run({"x": zeros((2, 2, 3, 4)), "past": zeros((2, 2, 0, 4))})["y"].shape == (2, 2, 3, 3)
    for x, past in (((0, 2, 3, 4), (0, 2, 5, 4)), ((2, 2, 0, 4), (2, 2, 0, 4))):
        with pytest.raises(InputRefused, match=r"nothing is left for the model's Einsum$"):
            loaded.run({"x": zeros(x), "past": zeros(past)})


def test_a_small_input_of_which_nothing_is_left_within_the_graph_is_refused() -> None:
    """ONNX Runtime's pools behind a Conv divide by the height of what they give, here 0; its GRU ends on no steps."""
    pooled = "c = Conv <pads = [1, 1, 1, 1]> (x, w) y = MaxPool <kernel_shape = [3, 3], strides = [2, 2]> (c)"
    changes = """
        one = Constant <value_ints = [1]> () all = Constant <value_ints = [1000]> ()
        last = Constant <value_ints = [-1]> () none = Constant <value_ints = [0]> ()
        later = Slice (x, one, all, none) before = Slice (x, none, last, none)
        changes = Sub (later, before) y = GRU <hidden_size = 8> (changes, w, w)"""
    for text, weight, runs, ends in (
        (pooled, (32, 16, 3, 3), (1, 16, 3, 8), (1, 16, 1, 8)),
        (changes, (1, 24, 8), (2, 1, 8), (1, 1, 8)),
    ):
        loaded = runtime(text, {"w": weight}, x=len(runs))
        loaded.run({"x": zeros(runs)})
        with pytest.raises(InputRefused, match=r"nothing is left for the model's (MaxPool|GRU)$"):
            loaded.run({"x": zeros(ends)})


def test_inputs_that_onnx_runtime_refuses_do_not_make_room_for_others() -> None:
    """Nor do sizes that do not fit hide an empty tensor: ONNX Runtime joins it with one of another batch."""
    attend = 'y = Einsum <equation = "bihd,bjhd->bhij"> (k, k)'
    added = runtime(f"k = Add (x, p) {attend}", {}, x=4, p=4)
    for batch in (2, 3):
        with pytest.raises(InputRefused):
            added.run({"x": zeros((batch, 0, 2, 4)), "p": zeros((3, 0, 2, 4))})
    with pytest.raises(InputRefused, match="nothing is left"):
        runtime(f"k = Concat <axis = 1> (x, p) {attend}", {}, x=4, p=4).run(
            {"x": zeros((1, 0, 2, 4)), "p": zeros((2, 0, 2, 4))}
        )
