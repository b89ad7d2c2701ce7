"""``bf16kit.convert``: models in memory, options as Python values, and what it returns and raises."""

import copy
import inspect
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import rich.console
import torch
from architectures import Cnn, Mlp, Several, Tied
from converting import tree
from safetensors.torch import save_file
from torch import nn

import bf16kit
import graphs
from bf16kit.converter.commands.checkpoint import checkpoint
from bf16kit.converter.keywords import Keywords, options_of
from bf16kit.converter.options import import_callable
from bf16kit.drift.metrics import Budget
from bf16kit.numerics.tensors import Array, TensorSpec

CHEAP: dict[str, Any] = {"profile": ["cpu"], "report": False}
# The command's own options, and convert's parameters.
_OTHERS = {"source", "out", "per_model", "jobs", "ray", "debug", "verbose", "as_json", "dry_run"}


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_every_option_of_the_command_is_a_keyword_and_no_other() -> None:
    parameters = {str(each.name): each for each in checkpoint.params if each.name not in _OTHERS}
    assert sorted(Keywords.__annotations__) == sorted(parameters)
    assert list(inspect.signature(bf16kit.convert).parameters) == ["source", "out", "progress", "options"]
    for name in ("format", "profile", "subnormals"):
        for choice in parameters[name].type.choices:  # type: ignore[attr-defined]
            options_of(Path("m"), Path("r/m/1"), {name: [choice]} if name != "subnormals" else {name: choice})
    parsed = checkpoint.make_context("checkpoint", ["m", "--out", "r/m/1"]).params
    as_the_command_has_them = options_of(Path("m"), Path("r/m/1"), {name: parsed[name] for name in parameters})
    assert options_of(Path("m"), Path("r/m/1"), {}) == as_the_command_has_them


@pytest.mark.parametrize(
    ("given", "field", "parsed"),
    [
        ({"input": {"x": ("float32", ["batch", 16])}}, "inputs", (TensorSpec("x", "float32", ("batch", 16)),)),
        ({"input": [("x", "float32", ("batch", 16))]}, "inputs", (TensorSpec("x", "float32", ("batch", 16)),)),
        ({"input": "x:float32:batch,16"}, "inputs", (TensorSpec("x", "float32", ("batch", 16)),)),
        ({"output": {"y": "logits"}}, "outputs", {"y": "logits"}),
        (
            {"budget": {"max_abs": 0.5, "slice_error": None}},
            "budget",
            Budget.parse(["max_abs=0.5", "slice_error=none"]),
        ),
        ({"keep_fp32": "layer.0"}, "keep_fp32", ("layer.0",)),
        ({"model_args": {"hidden": 3}}, "model_args", {"hidden": 3}),
        ({"profile": "cpu"}, "optional", ()),
        ({"search": None}, "search", True),  # None is not given
    ],
)
def test_options_are_pythons_values(given: Mapping[str, Any], field: str, parsed: object) -> None:
    assert getattr(options_of(Path("m"), Path("r/m/1"), given), field) == parsed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"profile": ["gpu"]}, "--profile gpu: is not one of cpu, cpu-bf16, cuda"),
        ({"subnormals": "drop"}, "--subnormals drop: is not one of keep, flush"),
        ({"seed": -1}, "--seed -1: expected a whole number of 0 or more"),
        ({"search_minutes": 0}, "--search-minutes 0: expected a number above 0"),
        ({"residual": "no"}, "residual='no': expected True or False"),
        ({"model": Mlp}, "expected text; to convert a module that is in memory, pass it in place of the path"),
        ({"map": 3}, "map=3: expected text"),
        ({"model_args": 3}, "--model-args: not JSON"),
        ({"profile": 3}, "profile=3: is neither text"),
        ({"input": {"x": "float32"}}, "input={'x': 'float32'}: is neither text nor a sequence or mapping of it"),
        ({"input": {"x": ("float31", [1])}}, "unknown dtype 'float31'"),
        ({"budget": {"relativ_l2": 1}}, "budget: unknown metric 'relativ_l2'"),
        ({"budget": {"relative_l2": "small"}}, "'small' is not a number"),
        ({"samples": 3}, "samples: is int; expected an array"),
        ({"samples": []}, "a module does not describe its inputs; pass input="),
        ({"samples": [np.zeros(3), np.zeros((3, 3))]}, "do not have the same inputs"),
        (
            {"model": "pkg:f", "input": "x:float32:b,16"},
            "--model: a torch module in memory brings its own architecture",
        ),
        ({"weights": "ema", "input": "x:float32:b,16"}, "<Mlp> is a torch module in memory"),
        pytest.param(
            {"input": "x:float32:b,16", "samples": [{"x": np.zeros((2, 16))}]},
            "--samples in memory, sample 0: input 'x' has dtype float64, expected float32",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"input": "x:float32:b,17"},
            "<Mlp>: the model failed on an example input (x[2, 17])",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_wrong_value_is_refused_with_the_value_and_what_was_expected(
    net: Mlp, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(bf16kit.Bf16kitError) as refused:
        bf16kit.convert(net, out=tmp_path / "m" / "1", **CHEAP | given)
    assert said in str(refused.value)
    assert tree(tmp_path) == []


@pytest.mark.parametrize(("first", "last"), [([""], []), ([], [""])])
def test_importing_a_users_function_changes_no_order_in_which_python_looks_for_modules(
    monkeypatch: pytest.MonkeyPatch, first: list[str], last: list[str]
) -> None:
    others = [path for path in sys.path if path]
    monkeypatch.setattr(sys, "path", [*first, *others])
    for _ in range(2):
        import_callable("--model", "architectures:Mlp")
        assert sys.path == [*first, *others, *last]


def test_an_error_of_what_yields_samples_is_the_users(net: Mlp, tmp_path: Path) -> None:
    def samples() -> Iterator[Array]:
        yield np.zeros((2, 16), np.float32)
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        bf16kit.convert(net, out=tmp_path / "m" / "1", samples=samples(), **CHEAP)


def test_an_unknown_keyword_and_an_unknown_source_are_type_errors(net: Mlp, tmp_path: Path) -> None:
    unknown: dict[str, Any] = {"buget": {}}
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'buget'; did you mean 'budget'\?"):
        bf16kit.convert(net, out=tmp_path / "m" / "1", **unknown)
    with pytest.raises(TypeError, match="takes a path, a torch"):
        bf16kit.convert({}, out=tmp_path / "m" / "1")  # type: ignore[arg-type]


@pytest.mark.long
def test_a_module_in_memory_becomes_what_its_checkpoint_becomes(net: Mlp, tmp_path: Path, x: Array) -> None:
    save_file(net.state_dict(), tmp_path / "m.safetensors")
    given: dict[str, Any] = {"input": {"x": ("float32", ["batch", 16])}, "samples": x, **CHEAP}
    of_file = bf16kit.convert(
        tmp_path / "m.safetensors", out=tmp_path / "file" / "1", model="architectures:Mlp", **given
    )
    first = bf16kit.convert(net, out=tmp_path / "m" / "1", **given)
    again = bf16kit.convert(copy.deepcopy(net), out=tmp_path / "again" / "m" / "1", **given)
    assert _files(first.path) == _files(again.path)
    ours, theirs = _files(first.path), _files(of_file.path)
    assert {name for name in ours if ours[name] != theirs[name]} == {"manifest.json"}  # name and source
    with torch.no_grad():
        net.up.weight[0, 0] += 1
    other = bf16kit.convert(net, out=tmp_path / "other" / "1", **given)
    digests = {each.artifact.manifest.source.sha256 for each in (first, again, other)}
    assert (first.artifact.manifest.source.format, len(digests)) == ("torch-module", 2)


@pytest.mark.long
def test_groups_and_upsampling_in_the_kernel_are_within_budget(tmp_path: Path) -> None:
    """As in a RegNet and in a U-Net. Loading runs the golden samples, and a row's bits do not depend on its batch."""
    torch.manual_seed(0)
    layers = (
        *(nn.Conv2d(64, 96, 3, stride=2, padding=1), nn.BatchNorm2d(96), nn.ReLU()),
        *(nn.Conv2d(96, 96, 3, padding=1, groups=2), nn.BatchNorm2d(96), nn.ReLU()),
        *(nn.ConvTranspose2d(96, 64, 4, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3)),
    )
    x = np.random.default_rng(0).standard_normal((3, 64, 20, 16), np.float32)
    given: dict[str, Any] = {"input": {"x": ("float32", ["batch", 64, 20, 16])}, "report": False}
    made = bf16kit.convert(nn.Sequential(*layers).eval(), out=tmp_path / "m" / "1", samples=x, **given)
    graph = onnx.load(made.path / "cpu-bf16.onnx", load_external_data=False).graph
    assert [node.op_type for node in graph.node if node.domain == "bf16kit"] == [
        *("ConvBf16_panels_relu", "ConvBf16_panels_relu", "ConvBf16_panels_relu", "ConvBf16_panels")
    ]
    made.artifact.verify()
    model = bf16kit.load(made.path, profile="cpu-bf16")
    (whole,) = model(x).values()
    for row in range(3):
        (alone,) = model(x[row : row + 1]).values()
        assert np.array_equal(alone[0], whole[row])


@pytest.mark.long
def test_a_table_that_is_renormalised_as_it_is_read_stays_as_it_is(tmp_path: Path) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(40, 16, max_norm=0.5), nn.Linear(16, 4)

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(self.table(ids).sum(1))

    module = Embedded()
    before = module.table.weight.detach().clone()
    bf16kit.convert(module, out=tmp_path / "m" / "1", samples=np.arange(40).reshape(8, 5), **CHEAP)
    assert torch.equal(module.table.weight, before)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_callers_module_stays_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    module = Cnn().to(dtype).train()
    module.features[1].eval()
    module.head.weight.requires_grad = False
    seen: list[str] = []
    module.register_forward_hook(lambda *_: seen.append("hook"))

    def state() -> list[Any]:
        return [
            [(n, p.data_ptr(), p.dtype, p.requires_grad, p.device) for n, p in module.named_parameters()],
            [(n, b.data_ptr(), b.dtype, b.clone().tolist()) for n, b in module.named_buffers()],
            [(n, each.training) for n, each in module.named_modules()],
            {n: t.clone().tolist() for n, t in module.state_dict().items()},
        ]

    before = state()
    images = np.random.default_rng(1).normal(size=(4, 3, 16, 16)).astype(np.float32)
    result = bf16kit.convert(module, out=tmp_path / "cnn" / "1", samples=images, **CHEAP)
    assert state() == before
    kept = dict(result.artifact.checkpoint_tensors())
    assert sorted(kept) == sorted(module.state_dict())
    assert kept["head.weight"].dtype.name == str(dtype).removeprefix("torch.")
    seen.clear()
    assert bf16kit.compare(bf16kit.load(result.path), module.float(), images).within
    assert seen == ["hook"]
    assert module.training


class _Sparse(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.register_buffer("w", torch.eye(16).to_sparse(layout=layout))


class _Padded(nn.Module):
    """x [batch, seq, 16] → an encoder; ``padding`` [batch, seq] is true where a sequence has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> Any:
        return self.layers(x, src_key_padding_mask=padding)


class _Counting(Mlp):
    runs: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.runs += 1
        return super().forward(x) + self.runs


class _Switching(Mlp):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) if x.shape[0] <= 30 else super().forward(self.factor * x)


class _Graded(nn.Module):
    """x [n, time, 16] → its even steps, graded; torch fixes their number without a word, since it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        even = x[:, ::2]
        return self.out(even * torch.linspace(0, 1, even.shape[1])[:, None])


class _Nearest(nn.Module):
    """points [n, 3] → what each point and its third neighbour are; it takes no fewer points than three."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 4)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        distances = (points[:, None] - points).square().sum(2)
        result: torch.Tensor = self.out(points + points[distances.topk(3, largest=False).indices[:, 2]])
        return result


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_module_whose_graph_computes_something_else_is_refused_with_the_cause(tmp_path: Path, x: Array) -> None:
    padded = {"x": x.reshape(16, 8, 16), "padding": np.arange(8) >= np.arange(1, 17)[:, None]}
    for module, samples, said in (
        (_Padded(), padded, "with enable_nested_tensor=False it computes the same in all modes"),
        (_Counting(), x, "the module changes its own 'runs', so output 'output' differs from run to run"),
    ):
        with pytest.raises(bf16kit.ConversionError, match=said):
            bf16kit.convert(module, out=tmp_path / "m" / "1", samples=samples, **CHEAP)


@pytest.mark.long
def test_a_size_at_which_the_module_branches_is_noted(tmp_path: Path, x: Array) -> None:
    """If a sample shows that both branches give the same, there is nothing to note."""
    for factor, rows in ((2, 20), (1, 40)):
        result = bf16kit.convert(_Switching(factor), out=tmp_path / "m" / str(factor), samples=x[:rows], **CHEAP)
        said = "the graph holds only where batch <= 30: the module branches on sizes, or checks them"
        assert (said in result.notes) == (factor == 2)


class _Padding(nn.Module):
    """x [batch, n] → [batch, 8]; n is filled up to a multiple of four, as images are for windows of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % 4:
            x = nn.functional.pad(x, (0, 4 - x.shape[1] % 4))
        result: torch.Tensor = self.out(x.reshape(x.shape[0], -1, 4)).mean(1)
        return result


@pytest.mark.long
def test_a_graph_that_does_not_hold_for_a_sample_is_refused_with_the_size_on_which_the_module_branches(
    tmp_path: Path,
) -> None:
    samples = [graphs.values(16, size) for size in (8, 12)]
    said = r"holds only where \(x_1 % 4\) != 0, because .* a sample has batch = 16, x_1 = 8; declare dimensions"
    with pytest.raises(bf16kit.Bf16kitError, match=said):
        bf16kit.convert(_Padding(), out=tmp_path / "m" / "1", samples=samples, **CHEAP)


@pytest.mark.long
def test_a_graph_that_runs_on_no_other_sizes_than_its_example_is_refused_with_what_to_declare(tmp_path: Path) -> None:
    samples = [graphs.values(4, steps, 16) for steps in (20, 24)]
    with pytest.raises(
        bf16kit.RuntimeFailure, match="made for some sizes only: declare free dimensions as the numbers"
    ):
        bf16kit.convert(_Graded(), out=tmp_path / "m" / "1", samples=samples, **CHEAP)


@pytest.mark.long
def test_a_module_that_takes_many_rows_only_is_exported_from_a_whole_sample(tmp_path: Path) -> None:
    clouds = [graphs.values(size, 3, seed=size) for size in (40, 30)]
    result = bf16kit.convert(_Nearest(), out=tmp_path / "m" / "1", samples=clouds, **CHEAP)
    assert result.artifact.manifest.batch_axis is None
    assert bf16kit.load(result.path)(clouds[0][:9])["output"].shape == (9, 4)


@pytest.mark.filterwarnings("ignore:.torch.jit.(trace|trace_method). is deprecated")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_module_that_cannot_be_converted_is_refused_with_the_reason(net: Mlp, tmp_path: Path, x: Array) -> None:
    class Locked(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.out = (i for i in range(3))  # generators cannot be copied

    scripted = torch.jit.trace(net, torch.from_numpy(x))  # type: ignore[no-untyped-call]
    for module, said in (
        (Locked(), "<Locked>: copy.deepcopy cannot copy the module, which conversion works on: TypeError"),
        (nn.Sequential(nn.LazyLinear(4)), "<Sequential>: its weights have no values yet: ValueError: Attempted to use"),
        (nn.Linear(16, 4, device="meta"), "<Linear>: its weights have no values yet: NotImplementedError: Cannot copy"),
        (nn.ReLU(), "<ReLU>: has neither parameters nor buffers, so there is nothing to convert"),
        (_Sparse(torch.sparse_coo), "<_Sparse>: tensor 'w' is sparse (torch.sparse_coo); make it dense: tensor.to_"),
        (_Sparse(torch.sparse_csr), "<_Sparse>: tensor 'w' is sparse (torch.sparse_csr); make it dense: tensor.to_"),
        (scripted, "the module is TorchScript; save it with torch.jit.save"),
    ):
        with pytest.raises(bf16kit.UsageError) as refused:
            bf16kit.convert(module, out=tmp_path / "m" / "1", samples=x, **CHEAP)
        assert said in str(refused.value)


@pytest.mark.long
def test_an_onnx_model_in_memory_becomes_what_its_file_becomes(tmp_path: Path, x: Array) -> None:
    proto = graphs.mlp()
    before = proto.SerializeToString(deterministic=True)
    onnx.save(proto, tmp_path / "m.onnx")
    given: dict[str, Any] = {"samples": [x, x[:3]], **CHEAP}
    of_file = bf16kit.convert(str(tmp_path / "m.onnx"), out=tmp_path / "a" / "m" / "1", **given)
    in_memory = bf16kit.convert(proto, out=tmp_path / "b" / "m" / "1", **given)
    assert _files(of_file.path) == _files(in_memory.path)
    assert proto.SerializeToString(deterministic=True) == before


class WithState(Mlp):
    """Its state dict holds more than tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"step": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class _Wrapping(nn.Module):
    """As torch.nn.DataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Several()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


class _Extensible(Mlp):
    def forward(self, x: torch.Tensor, **_options: Any) -> Any:
        return super().forward(x)


class _Loader:
    def __getitem__(self, index: int) -> Any:
        if index >= 2:
            raise IndexError
        return torch.ones(2 + index, 16, requires_grad=True), torch.zeros(2 + index)  # labels


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch.compile's
@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "samples", "inputs"),
    [
        (Mlp, lambda x: iter([x[:5], torch.from_numpy(x[:2])]), {"x": ["batch", 16]}),
        (Mlp, lambda x: _Loader(), {"x": ["batch", 16]}),
        (Several, lambda x: {"a": x, "b": x[:, :8]}, {"a": ["batch", 16], "b": ["batch", 8]}),
        (Several, lambda x: [(x, x[:, :8])], {"a": ["batch", 16], "b": ["batch", 8]}),
        (_Wrapping, lambda x: [(x, x[:, :8])], {"input_0": ["batch", 16], "input_1": ["batch", 8]}),
        (_Extensible, lambda x: [(x, x[:, 0])], {"x": ["batch", 16]}),  # labels
        (lambda: torch.compile(WithState()), lambda x: x, {"x": ["batch", 16]}),
        (Tied, lambda x: [np.arange(n * m).reshape(n, m) for n, m in ((2, 3), (2, 5))], {"ids": ["batch", "ids_1"]}),
    ],
)
def test_the_inputs_of_a_module_are_those_of_its_samples(
    tmp_path: Path,
    x: Array,
    module: Callable[[], nn.Module],
    samples: Callable[[Array], Any],
    inputs: dict[str, list[Any]],
) -> None:
    result = bf16kit.convert(
        module(), out=tmp_path / "m" / "1", samples=samples(x), budget={"slice_error": None}, **CHEAP
    )
    assert {each.name: each.shape for each in result.artifact.manifest.inputs} == inputs
    assert "the inputs are those of the samples: " in result.notes[0]


@pytest.mark.long
def test_drift_over_budget_raises_the_figures_or_is_returned(net: Mlp, tmp_path: Path, x: Array) -> None:
    given: dict[str, Any] = {"samples": x, "budget": {"relative_l2": 1e-9}, "search": False, **CHEAP}
    with pytest.raises(bf16kit.BudgetExceeded) as raised:
        bf16kit.convert(net, out=tmp_path / "m" / "1", **given)
    assert raised.value.drift is not None
    (row,) = raised.value.drift.over
    assert (row.profile, row.output, row.metric, row.bound) == ("cpu", "output", "relative_l2", 1e-9)
    assert tree(tmp_path) == []
    result = bf16kit.convert(net, out=tmp_path / "m" / "1", allow_over_budget=True, **given)
    assert (result.drift.within, result.drift.over) == (False, (row,))


def test_a_result_has_the_figures_of_its_artifact(converted: bf16kit.Conversion) -> None:
    measured = converted.artifact.manifest.drift
    assert {name: sorted(outputs) for name, outputs in converted.drift.items()} == {n: ["output"] for n in measured}
    for profile, entry in measured.items():
        figures = converted.drift[profile]["output"]
        assert figures["relative_l2"] == entry.outputs["output"]["relative_l2"]["mean"]
    assert (len(converted.drift), "absent" in converted.drift) == (len(measured), False)
    assert converted.budget["relative_l2"] == 1.5e-2
    assert converted.sizes.checkpoint == sum(each.numel() for each in Mlp().parameters()) * 4
    assert 0 < converted.seconds < 600
    text = repr(converted)
    assert all(part in text for part in (str(converted.path), "relative_l2", "cuda, emulated", *converted.notes))
    shown = io.StringIO()
    rich.console.Console(file=shown, width=160).print(converted, converted.drift)
    assert shown.getvalue().count("cuda, emulated") == (text + repr(converted.drift)).count("cuda, emulated")
    rows = converted.drift.rows
    assert converted.drift._repr_html_().count("<tr>") - 1 == len(rows)
    assert converted._repr_html_().count("<tr>") - 1 == len([row for row in rows if row.bound is not None]) > 3


@pytest.mark.long
def test_what_a_notebook_shows_is_escaped(tmp_path: Path, x: Array) -> None:
    class Named(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            return {"<script>": super().forward(x)}

    result = bf16kit.convert(Named(), out=tmp_path / "m" / "1", samples=x, profile=["cpu"])
    report = result.report()._repr_html_()
    assert "<script>" not in result._repr_html_() + result.drift._repr_html_() + report
    assert (result.path / "report.html").read_text("utf-8").count("<h2") == report.count("&lt;h2") > 3
