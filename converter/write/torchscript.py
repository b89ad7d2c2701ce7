"""Writes the bf16 TorchScript module: traced with bf16 weights and activations inside, float32 at its edges."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.jit._trace import TracerWarning

from bf16kit.converter.process.quiet import quiet, reason
from bf16kit.converter.process.tensorfiles import TensorFiles
from bf16kit.converter.source import TorchModel
from bf16kit.messages.errors import ConversionError
from bf16kit.messages.wording import brief
from bf16kit.runtime import scriptgraph

_MANGLED = re.compile(rb"___torch_mangle_\d+")
# Records that the writer makes itself, or that hold only this machine's paths of the traced Python code.
_WRITERS_OWN = ("version", "byteorder", ".data/", ".format_version", ".storage_alignment")
_MODEL = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_MARK = "_jit_is_scripting"


def narrow_and_trace(model: TorchModel, path: Path, *, strictly: bool = False) -> None:
    """Write ``model`` in bf16 to ``path`` as a legacy TorchScript file; the same model gives the same bytes.

    The module is restored afterwards. Raises :class:`ConversionError` if torch cannot trace it and, with ``strictly``,
    if torch warns that the trace depends on the example.
    """
    with (
        raw_archive(path, "torch cannot trace the model in bf16") as raw,
        narrowed(model.module, path.parent) as module,
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always", TracerWarning)
        _forget_classes()
        traced = torch.jit.trace(Autocast(module).eval(), model.example, check_trace=False)
        warning = next((one.message for one in found if issubclass(one.category, TracerWarning)), None)
        if strictly and warning is not None:
            raise ConversionError(
                "a trace would fix choices that depend on the example input (a branch, a size); script the module"
                f" instead, with torch.jit.script(module).save('model.pt'), and convert that file: {brief(warning)}"
            )
        refuse_changes(torch.jit.freeze(traced, optimize_numerics=False).graph, "torch cannot trace the model in bf16")
        torch.jit.save(traced, str(raw))


def refuse_changes(graph: Any, failed: str) -> None:
    """Raise :class:`ConversionError` if the frozen ``graph`` changes a tensor of its module: requests run at once.

    Freezing made constants of the attributes that nothing changes. A trace does so with tensors that are no attributes,
    such as ``torch.tensor([0.0])`` or a list's, changed or not.
    """
    aliases = graph.alias_db()
    for node in scriptgraph.nodes(graph):
        kept = node.kind() in ("prim::GetAttr", "prim::Constant")
        if node.kind() == "prim::SetAttr" or (kept and aliases.has_writers(node.output())):
            what = f"its own {node.s('name')!r}" if node.hasAttribute("name") else "a constant tensor, made only once"
            raise ConversionError(
                f"{failed}: it changes {what}, which requests at once share; return a new tensor instead"
            )


@contextmanager
def raw_archive(path: Path, failed: str) -> Iterator[Path]:
    """Yield the path of a file for torch to write; then copy it to ``path``, the same for the same model.

    Without the copy's changes it would hold this machine's paths and counters of its process. While active, torch is
    quiet and computes no gradients. Whatever torch or the user's model raises becomes a :class:`ConversionError`.
    """
    raw = path.with_name(f"{path.name}.raw.pt2")  # torch.export insists on the ending
    try:
        with quiet(), torch.no_grad():
            yield raw
        _copy_archive(raw, path)
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(f"{failed}: {reason(error)}") from error
    finally:
        raw.unlink(missing_ok=True)


def _forget_classes() -> None:
    """Make torch forget the classes of earlier traces, because they would change the names of this trace's classes.

    All three registries are cleared, as torch's own tests do. A type remembered after its class was forgotten would end
    the process when a module of that kind is scripted again.
    """
    torch._C._jit_clear_class_registry()
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    torch.jit._state._clear_class_state()


def _copy_archive(raw: Path, path: Path) -> None:
    """Copy the archive ``raw`` to ``path`` without debug records and metadata, with its class names numbered from 0.

    torch numbers the classes of a trace by a counter of the process. The numbers occur in record names, in the code,
    and in ``data.pkl`` as text without a length, so they can be replaced. A torch.export program also holds sample
    inputs, guards, and metadata of its nodes. The copy has the version of ``raw``: in an older one, torch would read
    some operators as they were then.
    """
    reader = torch._C.PyTorchFileReader(str(raw))
    records = reader.get_all_records()
    names = [n for n in records if not n.startswith(_WRITERS_OWN) and not n.endswith(".debug_pkl")]
    mangled = {found for name in names for found in _MANGLED.findall(name.encode())}
    in_order = sorted(mangled, key=lambda found: int(found.rpartition(b"_")[2]))
    numbers = {found: b"___torch_mangle_%d" % index for index, found in enumerate(in_order)}

    def renumbered(text: bytes) -> bytes:
        return _MANGLED.sub(lambda found: numbers.get(found[0], found[0]), text)

    # A stream, not a path: given a path, the writer puts the path's stem into the archive.
    with path.open("xb") as file:
        writer = torch._C.PyTorchFileWriter(file)
        if _MODEL not in records:
            version = next(name for name in (".data/version", "version") if name in records)
            writer.set_min_version(int(reader.get_record(version)))
        for name in sorted(names) if _MODEL in records else names:
            record = b"" if name == _SAMPLES else reader.get_record(name)
            if name == _MODEL:
                record = _plain(json.loads(record))
            elif name.startswith("code/") or name == "data.pkl":
                record = renumbered(record)
            writer.write_record(renumbered(name.encode()).decode(), record, len(record))
        writer.write_end_of_file()


def _plain(program: dict[str, Any]) -> bytes:
    """Return the JSON of ``program``, the same every time."""
    for node in program["graph_module"]["graph"]["nodes"]:
        node["metadata"] = {}
    return json.dumps(program | {"guards_code": []}, sort_keys=True, separators=(",", ":")).encode()


class Autocast(torch.nn.Module):
    """Runs ``module`` under autocast and widens bf16 outputs, so that inputs and outputs are float32."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            outputs = self.module(*tensors)
        return tuple(_widen(output) for output in outputs)


@contextmanager
def narrowed(module: torch.nn.Module, scratch: Path) -> Iterator[torch.nn.Module]:
    """Round ``module``'s matrices and their biases to bf16 while the block runs; then restore them.

    The rounded tensors are kept in temporary files in ``scratch``. 1-D parameters of norms stay fp32. Kernels that need
    input and parameters of one dtype (norms on CUDA) get fp32 inputs, and tables return fp32. Recurrent layers stay
    fp32 as a whole: torch has no bf16 kernel for them on many CPUs. A state rounded at every step would also drift with
    the length. Bilinear layers stay fp32 because autocast does not know them.
    """
    with ExitStack() as undo:
        with TensorFiles(scratch):
            for part in module.modules():
                _narrow(part, undo)
        yield module


def _narrow(part: torch.nn.Module, undo: ExitStack) -> None:
    for cls in type(part).__mro__:
        if _MARK in vars(cls):  # LightningModule: torch reads all properties, and ``trainer`` raises without the mark
            undo.callback(setattr, cls, _MARK, vars(cls)[_MARK])
            setattr(cls, _MARK, True)
    if isinstance(part, torch.nn.RNNBase | torch.nn.RNNCellBase | torch.nn.Bilinear):
        layer: Any = part  # a Bilinear's forward has a type
        undo.callback(setattr, layer, "forward", layer.forward)
        layer.forward = _in_fp32(layer.forward)
        return
    own = list(part.parameters(recurse=False))
    has_matrix = any(parameter.ndim > 1 for parameter in own)
    if has_matrix:
        for parameter in own:
            undo.callback(setattr, parameter, "data", parameter.data)
            parameter.data = _rounded(parameter.data)
    elif own:
        undo.callback(part.register_forward_pre_hook(lambda _, inputs: tuple(map(_widen, inputs))).remove)
    if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag):
        undo.callback(part.register_forward_hook(lambda _part, _inputs, output: _widen(output)).remove)


def _in_fp32(forward: Callable[..., Any]) -> Callable[..., Any]:
    def widened(*inputs: Any, **named: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return forward(*map(_widen, inputs), **{name: _widen(value) for name, value in named.items()})

    return widened


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype is torch.float32 else tensor


def _widen(value: Any) -> Any:
    if isinstance(value, tuple | list):  # an LSTM's state; a packed sequence is returned unchanged
        return type(value)(map(_widen, value)) if type(value) in (tuple, list) else value
    return value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value


def narrow_and_export(model: TorchModel, path: Path) -> None:
    """Write ``model`` in bf16 to ``path`` as a torch.export archive; the same model gives the same bytes.

    The module is restored afterwards. Raises :class:`ConversionError` if torch cannot export it, or if it changes its
    own buffers, which several requests would do at once, or its inputs.
    """
    dynamic = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(spec.shape) if isinstance(dim, str)}
        for spec in model.inputs
    )
    shapes = (dynamic,) if any(dynamic) else None
    failed = "torch cannot export the model in bf16"
    with raw_archive(path, failed) as raw, narrowed(model.module, path.parent) as module:
        exported = torch.export.export(Autocast(module).eval(), model.example, dynamic_shapes=shapes, strict=False)
        # Autocast becomes explicit casts, and in-place operators become ones that are not in place.
        program = exported.run_decompositions({})
        signature = program.graph_signature
        for changed in (*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()):
            raise ConversionError(
                f"{failed}: it changes its own buffer or input {changed.removeprefix('module.module.')!r}"
            )
        torch.export.save(program, raw)
