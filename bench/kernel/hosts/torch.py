"""torch, eager or compiled: the same model, from the library that users have it from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import torch

from bench.core import models
from bench.kernel.hosts import Absent, Feeds, Prepare, Run, Subject
from bench.kernel.sides import THREADS


def open_side(options: Mapping[str, str], subject: Subject) -> Prepare:
    """In evaluation mode; compiled anew, with its weights frozen into the code, for every shape."""
    torch.set_num_threads(THREADS)
    dtype: torch.dtype = getattr(torch, options["dtype"])
    module = _module(subject).to(dtype).eval()
    backend = options.get("compiled", "")
    if backend:
        _allow_compiling(backend)

    def prepare(feeds: Feeds, _: float) -> Run:
        tensors = {name: _tensor(array, dtype) for name, array in feeds.items()}
        arguments, named = (list(tensors.values()), {}) if len(tensors) == 1 else ([], tensors)
        called: Callable[..., object] = _compiled(module, backend, subject) if backend else module

        def run() -> object:
            with torch.no_grad() if backend else torch.inference_mode():
                return called(*arguments, **named)

        return run

    return prepare


def _allow_compiling(backend: str) -> None:
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise Absent("torch.compile needs a C++ compiler: install g++")
    import torch._inductor.config as inductor

    inductor.freezing = True
    if backend == "zentorch":
        if find_spec("zentorch") is None:
            raise Absent("zentorch is not installed: pip install '.[bench]'")
        import_module("zentorch")  # adds itself to torch.compile's backends


def _compiled(module: torch.nn.Module, backend: str, subject: Subject) -> Callable[..., object]:
    """Bare products are also tuned, each kernel against others; for whole models that would take many minutes."""
    torch._dynamo.reset()  # what was compiled for other shapes holds copies of the weights
    mode = "max-autotune-no-cudagraphs" if subject.name == "layers" and backend == "inductor" else None
    found: Callable[..., object] = torch.compile(module, backend=backend, dynamic=False, mode=mode)
    return found


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _module(subject: Subject) -> torch.nn.Module:
    if subject.name == "layers":
        return _layers(subject)
    if subject.name == "minilm":
        return _minilm()
    from bench.kernel import torch_lm

    return torch_lm.step(tied=subject.name == "lm_tied")


def _layers(subject: Subject) -> torch.nn.Module:
    import onnx
    from onnx import numpy_helper

    linears = []
    for tensor in onnx.load(subject.graph).graph.initializer:
        weight = np.ascontiguousarray(numpy_helper.to_array(tensor).T)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(torch.from_numpy(weight))
        linears.append(linear)
    return torch.nn.Sequential(*linears)


def _minilm() -> torch.nn.Module:
    models.demo_on_path()
    import minilm
    from transformers import AutoModel

    from bf16kit.converter.process.quiet import quiet

    with quiet():  # it would list the weights of the pooler, which is left out
        module: torch.nn.Module = AutoModel.from_pretrained(minilm.checkpoint(), add_pooling_layer=False)
    return module
