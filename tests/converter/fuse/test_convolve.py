"""Convolutions of images become the kernel's in cpu-bf16, in regions with channels last; cpu keeps ONNX Runtime's."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from layers import answers, ours
from lowered import Lowered, lower
from onnx import ModelProto, NodeProto, TensorProto, helper

import graphs
from bf16kit.converter.report.oncpu import on_cpu
from bf16kit.numerics.rounding import to_bf16, to_fp32
from bf16kit.runtime.ort.kernel import LIBRARY
from bf16kit.runtime.ort.session import ort

C, ROUNDING = 64, "cpu-bf16"
Made = tuple[list[NodeProto], list[TensorProto]]


def conv(
    made: Made, x: str, y: str, shape: tuple[int, ...], *, bias: bool = True, op: str = "Conv", **attributes: Any
) -> None:
    """Add y = Conv(x) by a weight of ``shape``, small enough that the values keep their magnitude."""
    nodes, weights = made
    name, place = f"w_{y}", len(nodes)
    weights.append(graphs.initializer(name, graphs.values(*shape, seed=place, scale=np.prod(shape[1:]) ** -0.5)))
    if bias:
        n = shape[1] if op == "ConvTranspose" else shape[0]
        weights.append(graphs.initializer(f"b_{y}", graphs.values(n, seed=place + 99)))
    nodes.append(helper.make_node(op, [x, name, *([f"b_{y}"] if bias else [])], [y], name=y, **attributes))


def node(made: Made, op: str, x: str, y: str, **attributes: Any) -> None:
    made[0].append(helper.make_node(op, x.split(), [y], name=y, **attributes))


def model(made: Made, x: tuple[int | str, ...], outputs: tuple[str, ...] = ("y",)) -> ModelProto:
    return graphs.model(made[0], [graphs.edge("x", x)], [graphs.edge(name, None) for name in outputs], made[1])


def network() -> ModelProto:
    """Return a residual block, a depthwise convolution with a bounded activation, SiLU, a concatenation and a mean."""
    made: Made = (
        [],
        [graphs.initializer("low", np.array(0, np.float32)), graphs.initializer("high", np.array(6, np.float32))],
    )
    three: dict[str, Any] = {"pads": [1, 1, 1, 1]}
    conv(made, "x", "c1", (C, C, 3, 3), **three)
    node(made, "Relu", "c1", "r1")
    conv(made, "r1", "c2", (C, C, 3, 3), bias=False, **three)
    node(made, "Add", "c2 r1", "a1")
    conv(made, "a1", "c3", (80, C, 3, 3), **three)
    node(made, "Clip", "c3 low high", "k1")
    conv(made, "k1", "d1", (80, 1, 3, 3), group=80, strides=[2, 2], **three)
    node(made, "Clip", "d1 low high", "k2")
    conv(made, "k2", "c4", (C, 80, 1, 1))
    node(made, "Sigmoid", "c4", "g1")
    node(made, "Mul", "c4 g1", "s1")
    conv(made, "s1", "c5", (C, C, 3, 3), **three)
    node(made, "Concat", "c5 s1", "j1", axis=1)
    node(made, "HardSwish", "j1", "h1")
    node(made, "GlobalAveragePool", "h1", "p1")
    node(made, "Flatten", "p1", "y")
    return model(made, ("batch", C, 9, 11))


def optimised(made: Lowered, path: Path, *, kernel: bool) -> Counter[str]:
    """Return how often each operator is in the graph that ONNX Runtime makes of cpu-bf16."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    if kernel:
        options.register_custom_ops_library(str(LIBRARY))
    ort.InferenceSession(str(made.artifact.file(f"{ROUNDING}.onnx")), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def test_a_network_is_one_region_transposed_at_its_borders_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(tmp_path / "m" / "1", network(), profiles=["cpu", ROUNDING])
    assert ours(made, "cpu") == []
    found = {each.name: each.op_type for each in ours(made, ROUNDING)}
    assert found == {
        "c1": "ConvBf16_panels_relu",
        "c2": "ConvBf16_panels",
        "c3": "ConvBf16_panels_tail_relu6",
        "d1": "ConvDepthwise_relu6",
        "c4": "ConvBf16_panels_silu",
        "c5": "ConvBf16_panels",
    }
    x = {"x": graphs.values(2, C, 9, 11, seed=7)}
    kernel, *definitions = (each["y"] for each in answers(made, x, monkeypatch, ROUNDING))
    for other in definitions:  # the same but where a sum in another order rounds to the other neighbour
        np.testing.assert_allclose(kernel, other, rtol=0, atol=2e-3)
    np.testing.assert_allclose(made.run_source(x)["y"], kernel, rtol=0, atol=2e-2)
    assert np.abs(made.run_cpu(x)["y"] - kernel).max() > 1e-5  # something was rounded
    counts = optimised(made, tmp_path / "optimised.onnx", kernel=True)
    assert counts["Transpose"] == 2, "ONNX Runtime leaves a Transpose between two convolutions"
    assert optimised(made, tmp_path / "plain.onnx", kernel=False)["Transpose"] == 0
    one = {"x": x["x"][1:]}
    assert np.array_equal(made.run_kernel(one, ROUNDING)["y"], kernel[1:])


@pytest.mark.parametrize("padded", [False, True], ids=["", "by a Pad"])
def test_a_bottleneck_of_few_channels_is_one_node(
    padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its convolutions are too small for the kernel alone. The residual of the last stays an Add."""
    made: Made = ([], [graphs.initializer("around", np.array([0, 0, 1, 1, 0, 0, 1, 1]))])
    x = "x"
    for place, strides in enumerate([[2, 2], [1, 1], [1, 1]], 1):
        conv(made, x, f"w{place}", (96, 24, 1, 1))
        node(made, "Relu", f"w{place}", f"r{place}")
        if padded:
            node(made, "Pad", f"r{place} around", f"p{place}")
        windows: dict[str, Any] = {"strides": strides} | ({} if padded else {"pads": [1, 1, 1, 1]})
        conv(made, f"{'p' if padded else 'r'}{place}", f"d{place}", (96, 1, 3, 3), group=96, bias=False, **windows)
        node(made, "Relu", f"d{place}", f"s{place}")
        conv(made, f"s{place}", f"n{place}", (24, 96, 1, 1))
        x = f"n{place}"
    node(made, "Add", "n2 n3", "y")
    lowered = lower(tmp_path / "m" / "1", model(made, ("batch", 24, 17, 15)), profiles=["cpu", ROUNDING])
    assert ours(lowered, "cpu") == []
    found = {each.name: each.op_type for each in ours(lowered, ROUNDING)}
    assert found == dict.fromkeys(["n1", "n2", "n3"], "ConvBlockBf16_panels_panels_narrow_relu")
    feeds = {"x": graphs.values(2, 24, 17, 15, seed=7)}
    kernel, *definitions = (each["y"] for each in answers(lowered, feeds, monkeypatch, ROUNDING))
    for other in definitions:
        np.testing.assert_allclose(kernel, other, rtol=0, atol=5e-3)
    np.testing.assert_allclose(lowered.run_source(feeds)["y"], kernel, rtol=0, atol=5e-2)
    assert optimised(lowered, tmp_path / "optimised.onnx", kernel=True)["Transpose"] == 2
    assert optimised(lowered, tmp_path / "plain.onnx", kernel=False)["Transpose"] == 0
    alone = lowered.run_kernel({"x": feeds["x"][1:]}, ROUNDING)["y"]
    assert np.array_equal(alone, kernel[1:])


@pytest.mark.parametrize(
    ("weight", "attributes", "size"),
    [
        ((C, C, 3, 3), {"strides": [2, 1], "dilations": [1, 2], "pads": [0, 3, 1, 2]}, (9, 8)),
        ((C, C, 1, 5), {"pads": [0, 2, 0, 2]}, (3, 12)),
        ((72, C, 7), {"strides": [3], "pads": [3, 1]}, (40,)),
        ((600, 600, 1, 1), {"strides": [2, 2]}, (5, 5)),
        ((C, C, 3, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}, (9, 8)),
        ((C, C, 2, 3), {"auto_pad": "SAME_LOWER"}, (9, 8)),
        ((C, C, 1, 3), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}, (9, 8)),
        ((C, C, 3, 3), {"auto_pad": "VALID"}, (9, 8)),
        ((144, 32, 3, 3), {"group": 3, "pads": [1, 1, 1, 1], "strides": [2, 2]}, (9, 8)),
        ((64, 48, 5), {"group": 2}, (40,)),
    ],
    ids=["image", "row", "sequence", "pixels", "upper", "lower", "none needed", "valid", "groups", "in a row"],
)
def test_every_window_gives_the_sums_of_its_rounded_pixels(
    weight: tuple[int, ...], attributes: dict[str, Any], size: tuple[int, ...], tmp_path: Path
) -> None:
    """Two convolutions, so that their arithmetic outweighs their borders; the source gets what the kernel rounds."""
    made: Made = ([], [])
    channels = weight[1] * attributes.get("group", 1)
    kept: dict[str, Any] = {"pads": [0] * 2 * len(size)} | ({"pads": [1] * 2 * len(size)} if weight[-1] > 1 else {})
    conv(made, "x", "c1", (channels, channels, *([3 if weight[-1] > 1 else 1] * len(size))), **kept)
    conv(made, "c1", "c0", (channels, channels, *([3 if weight[-1] > 1 else 1] * len(size))), **kept)
    conv(made, "c0", "y", weight, **attributes)
    lowered = lower(tmp_path / "m" / "1", model(made, ("batch", channels, *size), ("y", "c0")), profiles=[ROUNDING])
    assert [each.name for each in ours(lowered, ROUNDING)] == ["c1", "c0", "y"]
    found = lowered.run_kernel({"x": graphs.values(2, channels, *size, seed=3)}, ROUNDING)
    made[0][-1].input[0] = "x"
    alone = graphs.model(
        made[0][-1:],
        [graphs.edge("x", None)],
        [graphs.edge("y", None)],
        [graphs.initializer("w_y", lowered.artifact.tensor("w_y").astype(np.float32)), made[1][-1]],
    )
    session = ort.InferenceSession(alone.SerializeToString(), providers=["CPUExecutionProvider"])
    (right,) = session.run(["y"], {"x": to_fp32(to_bf16(found["c0"]))})
    np.testing.assert_allclose(found["y"], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "mean", "attributes"),
    [
        ((7, 5), "GlobalAveragePool", {}),
        ((7, 5), "ReduceMean", {"keepdims": 0}),
        ((20,), "GlobalAveragePool", {}),
        ((20,), "ReduceMean", {}),
    ],
)
def test_the_mean_of_an_image_has_the_same_bits_alone_and_in_a_batch(
    size: tuple[int, ...], mean: str, attributes: dict[str, Any], tmp_path: Path
) -> None:
    made: Made = ([], [graphs.initializer("axes", np.arange(-len(size), 0))])
    conv(made, "x", "c1", (C, C, *[5] * len(size)), pads=[2] * 2 * len(size))
    conv(made, "c1", "c2", (C, C, *[5] * len(size)), pads=[2] * 2 * len(size))
    node(made, "Relu", "c2", "r")
    node(made, mean, "r axes" if mean == "ReduceMean" else "r", "y", **attributes)
    lowered = lower(tmp_path / "m" / "1", model(made, ("batch", C, *size)), profiles=[ROUNDING])
    assert [each.name for each in ours(lowered, ROUNDING)] == ["c1", "c2"]
    x = graphs.values(8, C, *size, seed=3)
    whole = lowered.run_kernel({"x": x}, ROUNDING)["y"]
    np.testing.assert_allclose(lowered.run_source({"x": x})["y"], whole, rtol=0, atol=1e-2)
    for row in range(8):
        assert np.array_equal(lowered.run_kernel({"x": x[row : row + 1]}, ROUNDING)["y"], whole[row : row + 1])


def test_weights_in_panels_are_restored_bit_by_bit(tmp_path: Path) -> None:
    source = network()
    made = lower(tmp_path / "m" / "1", source, profiles=["cpu", ROUNDING])
    panels = {entry.name: entry.panels for entry in made.artifact.manifest.tensors if len(entry.shape) > 2}
    assert panels == dict.fromkeys(["w_c1", "w_c2", "w_c3", "w_c4", "w_c5"], 0) | {"w_d1": None}
    for name, weight in graphs.weights_of(source).items():
        if name in panels:
            assert np.array_equal(made.artifact.restore(name), weight)
            assert np.array_equal(made.artifact.tensor(name), to_bf16(weight))


def test_a_convolution_between_two_bottlenecks_is_in_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without activations, a convolution may end one bottleneck and begin the next."""
    made: Made = ([], [])
    conv(made, "x", "w1", (192, 192, 1, 1))
    conv(made, "w1", "d1", (192, 1, 3, 3), group=192, pads=[1, 1, 1, 1])
    conv(made, "d1", "w2", (192, 192, 1, 1))
    conv(made, "w2", "d2", (192, 1, 3, 3), group=192, pads=[1, 1, 1, 1])
    conv(made, "d2", "y", (192, 192, 1, 1))
    lowered = lower(tmp_path / "m" / "1", model(made, ("batch", 192, 17, 15)), profiles=[ROUNDING])
    assert [each.name for each in ours(lowered, ROUNDING)] == ["w2", "d2", "y"]
    feeds = {"x": graphs.values(2, 192, 17, 15, seed=7)}
    for each in answers(lowered, feeds, monkeypatch, ROUNDING):
        np.testing.assert_allclose(lowered.run_source(feeds)["y"], each["y"], rtol=0, atol=5e-2)


def test_a_clip_with_one_bound_is_no_activation_of_the_kernel(tmp_path: Path) -> None:
    """As torch exports ``clamp(min=0)``; in a bottleneck of so few channels, only ONNX Runtime's operators are left."""
    made: Made = ([], [graphs.initializer("low", np.array(0, np.float32))])
    conv(made, "x", "w1", (96, 24, 1, 1))
    node(made, "Clip", "w1 low", "r1")
    conv(made, "r1", "d1", (96, 1, 3, 3), group=96)
    node(made, "Clip", "d1 low", "s1")
    conv(made, "s1", "y", (24, 96, 1, 1))
    lowered = lower(tmp_path / "m" / "1", model(made, ("batch", 24, 17, 15)), profiles=[ROUNDING])
    assert ours(lowered, ROUNDING) == []


def test_few_channels_around_a_depthwise_convolution_that_is_not_the_kernels_stay(tmp_path: Path) -> None:
    """Its padding depends on the size, so the three are no bottleneck: `w1` alone is slower than ONNX Runtime's."""
    made: Made = ([], [])
    conv(made, "x", "c1", (192, 192, 3, 3))
    conv(made, "c1", "w1", (24, 192, 1, 1))
    conv(made, "w1", "d1", (24, 1, 3, 3), group=24, auto_pad="SAME_UPPER", strides=[2, 2])
    conv(made, "d1", "y", (48, 24, 1, 1))
    lowered = lower(tmp_path / "m" / "1", model(made, ("batch", 192, "height", "width")), profiles=[ROUNDING])
    assert [each.name for each in ours(lowered, ROUNDING)] == ["c1"]


def upsampled(weight: tuple[int, ...], size: tuple[int | str, ...], **attributes: Any) -> ModelProto:
    """Return two convolutions, then a ConvTranspose by ``weight`` and an activation of what the second gives, `c0`."""
    made: Made = ([], [])
    kept: dict[str, Any] = {"pads": [1] * 2 * len(size)}
    conv(made, "x", "c1", (weight[0], weight[0], *[3] * len(size)), **kept)
    conv(made, "c1", "c0", (weight[0], weight[0], *[3] * len(size)), **kept)
    conv(made, "c0", "t", weight, op="ConvTranspose", **attributes)
    node(made, "Relu", "t", "y")
    return model(made, ("batch", weight[0], *size), ("y", "c0"))


@pytest.mark.parametrize(
    ("weight", "attributes", "size"),
    [
        ((C, 40, 2, 2), {"strides": [2, 2]}, (9, 8)),
        ((C, 24, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}, (9, 8)),
        ((C, 16, 6, 4), {"strides": [2, 4], "pads": [0, 1, 2, 3], "output_padding": [1, 2]}, (5, 7)),
        ((C, 32, 3, 3), {}, (5, 7)),
        ((96, 8, 16), {"strides": [8], "pads": [4, 4]}, (40,)),
        ((96, 16, 4), {"strides": [2], "bias": False}, (40,)),
    ],
    ids=["cells", "overlapping", "uneven", "stride 1", "sequence", "without bias"],
)
def test_an_upsampled_image_has_the_sums_of_its_rounded_pixels(
    weight: tuple[int, ...], attributes: dict[str, Any], size: tuple[int, ...], tmp_path: Path
) -> None:
    source = upsampled(weight, ("height", *size[1:]) if len(size) > 1 else ("time",), **attributes)
    lowered = lower(tmp_path / "m" / "1", source, profiles=["cpu", ROUNDING])
    assert [(each.name, each.op_type.split("_")[-1]) for each in ours(lowered, ROUNDING)][2:] == [("t", "relu")]
    x = graphs.values(3, weight[0], *size, seed=3)
    found = lowered.run_kernel({"x": x}, ROUNDING)
    weights = graphs.weights_of(source)
    alone = graphs.model(
        list(source.graph.node)[2:],
        [graphs.edge("c0", None)],
        [graphs.edge("y", None)],
        [
            graphs.initializer(name, lowered.artifact.tensor(name).astype(np.float32) if name == "w_t" else value)
            for name, value in weights.items()
            if name.endswith("_t")
        ],
    )
    session = ort.InferenceSession(alone.SerializeToString(), providers=["CPUExecutionProvider"])
    (right,) = session.run(["y"], {"c0": to_fp32(to_bf16(found["c0"]))})
    np.testing.assert_allclose(found["y"], right, rtol=1e-5, atol=1e-5)
    for row in range(3):
        assert np.array_equal(lowered.run_kernel({"x": x[row : row + 1]}, ROUNDING)["y"], found["y"][row : row + 1])
    assert np.array_equal(lowered.artifact.restore("w_t"), weights["w_t"])
    np.testing.assert_allclose(lowered.run_cpu({"x": x})["y"], found["y"], rtol=0, atol=5e-2)


@pytest.mark.parametrize(
    ("weight", "size", "attributes"),
    [
        ((C, C, 3, 3), (9, 8), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
        ((C, C, 2, 2), ("height", "width"), {"strides": [2, 2]}),
        ((C, 32, 2, 2), (9, 8), {"strides": [2, 2], "group": 2}),
        ((C, C, 3, 3), (9, 8), {"dilations": [2, 2]}),
        ((C, 6, 2, 2), (9, 8), {"strides": [2, 2]}),
        ((C, C, 2, 2), (9, 8), {"strides": [2, 2], "output_shape": [18, 16]}),
        ((C, C, 2, 2), (9, 8), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ((C, C, 2, 2), (9, 8), {"strides": [2, 2], "output_padding": [1, 0]}),
        ((C, C, 4, 4), (9, 2), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ],
    ids=["uneven", "unknown width", "groups", "dilated", "part of a panel", "shape", "automatic", "longer", "small"],
)
def test_other_upsampling_stays_with_onnx_runtime(
    weight: tuple[int, ...], size: tuple[int | str, ...], attributes: dict[str, Any], tmp_path: Path
) -> None:
    lowered = lower(tmp_path / "m" / "1", upsampled(weight, size, **attributes), profiles=[ROUNDING])
    assert [each.name for each in ours(lowered, ROUNDING)] == ["c1", "c0"]


def test_upsampling_is_within_a_region_with_the_kernel_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a U-Net: an image is upsampled, joined with an earlier one, and convolved."""
    made: Made = ([], [])
    conv(made, "x", "c1", (C, C, 3, 3), pads=[1, 1, 1, 1])
    node(made, "Relu", "c1", "r1")
    conv(made, "r1", "c2", (C, C, 4, 4), strides=[2, 2], pads=[1, 1, 1, 1])
    conv(made, "c2", "t1", (C, 32, 2, 2), op="ConvTranspose", strides=[2, 2])
    node(made, "Concat", "t1 r1", "j1", axis=1)
    conv(made, "j1", "y", (32, C + 32, 3, 3), pads=[1, 1, 1, 1])
    lowered = lower(tmp_path / "m" / "1", model(made, ("batch", C, 18, 16)), profiles=["cpu", ROUNDING, "cuda"])
    assert [each.name for each in ours(lowered, ROUNDING)] == ["c1", "c2", "t1", "y"]
    feeds = {"x": graphs.values(2, C, 18, 16, seed=7)}
    kernel, *definitions = (each["y"] for each in answers(lowered, feeds, monkeypatch, ROUNDING))
    for other in (*definitions, lowered.run_source(feeds)["y"]):
        np.testing.assert_allclose(other, kernel, rtol=0, atol=5e-2)
    counts = optimised(lowered, tmp_path / "optimised.onnx", kernel=True)
    assert counts["Transpose"] == 3, "the borders and the cells"
    assert counts["Cast"] == counts["Gather"] == 0, "a weight is put into panels at each run"
    gained = on_cpu(lowered.artifact.manifest)
    assert gained is not None
    assert gained.memory < 0.51


def test_a_block_with_groups_is_the_kernels_and_its_weights_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a RegNet. Narrower groups, as in the first stages of a ResNeXt, are faster in ONNX Runtime."""
    made: Made = ([], [])
    conv(made, "x", "c1", (96, 96, 1, 1))
    node(made, "Relu", "c1", "r1")
    conv(made, "r1", "g1", (96, 48, 3, 3), group=2, bias=False, pads=[1, 1, 1, 1])
    node(made, "Relu", "g1", "r2")
    conv(made, "r2", "c2", (96, 96, 1, 1))
    node(made, "Add", "c2 x", "a")
    conv(made, "a", "c3", (96, 96, 1, 1))
    conv(made, "c3", "narrow", (96, 16, 3, 3), group=6, pads=[1, 1, 1, 1])
    conv(made, "narrow", "y", (96, 96, 1, 1))
    source = model(made, ("batch", 96, 17, 15))
    lowered = lower(tmp_path / "m" / "1", source, profiles=["cpu", ROUNDING, "cuda"])
    found = {each.name: each.op_type for each in ours(lowered, ROUNDING)}
    assert found["g1"] == "ConvBf16_panels_relu"
    assert "narrow" not in found
    feeds = {"x": graphs.values(3, 96, 17, 15, seed=7)}
    kernel, *definitions = (each["y"] for each in answers(lowered, feeds, monkeypatch, ROUNDING))
    for other in (*definitions, lowered.run_source(feeds)["y"], lowered.run_cpu(feeds)["y"]):
        np.testing.assert_allclose(other, kernel, rtol=0, atol=5e-2)
    assert np.array_equal(lowered.run_kernel({"x": feeds["x"][1:2]}, ROUNDING)["y"], kernel[1:2])
    for name, weight in graphs.weights_of(source).items():
        assert np.array_equal(lowered.artifact.restore(name), weight)


@pytest.mark.parametrize(
    ("width", "window", "strides"), [("width", 3, [1, 2]), (20, 1, [1, 4])], ids=["unknown size", "cropped"]
)
def test_automatic_padding_that_is_unknown_or_negative_stays_with_onnx_runtime(
    width: int | str, window: int, strides: list[int], tmp_path: Path
) -> None:
    made: Made = ([], [])
    conv(made, "x", "c1", (C, C, 3, 3), auto_pad="SAME_UPPER")
    conv(made, "c1", "c2", (C, C, 3, 3), auto_pad="SAME_UPPER")
    conv(made, "c2", "y", (C, C, 3, window), auto_pad="SAME_UPPER", strides=strides)
    lowered = lower(tmp_path / "m" / "1", model(made, ("batch", C, 20, width)), profiles=[ROUNDING])
    assert [each.name for each in ours(lowered, ROUNDING)] == ["c1", "c2"]


def test_what_would_not_pay_stays_with_onnx_runtime(tmp_path: Path) -> None:
    """A convolution between two borders, one of few columns, and a depthwise one after what is not the kernel's."""
    made: Made = ([], [])
    conv(made, "x", "alone", (32, C, 3, 3))
    node(made, "MaxPool", "alone", "p", kernel_shape=[2, 2])
    conv(made, "p", "few", (16, 32, 3, 3), pads=[1, 1, 1, 1])
    conv(made, "few", "wide", (96, 16, 1, 1))
    conv(made, "wide", "y", (96, 1, 3, 3), group=96)
    lowered = lower(tmp_path / "m" / "1", model(made, ("batch", C, 20, 20)), profiles=[ROUNDING])
    assert ours(lowered, ROUNDING) == []
    assert all(entry.panels is None for entry in lowered.artifact.manifest.tensors)
