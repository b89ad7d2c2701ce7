"""Reads a torch module that is in memory. The caller's module stays as it is: a copy with the same weights is read."""

from __future__ import annotations

import copy

import torch

from bf16kit.converter.options import Options
from bf16kit.converter.process.quiet import first_line
from bf16kit.converter.read import torch_file
from bf16kit.converter.read.bareweights import in_module
from bf16kit.converter.read.detect import Kind
from bf16kit.converter.read.sources import Advance, precision_notes
from bf16kit.converter.source import Checkpoint, Source, digest_tensors
from bf16kit.messages.errors import SourceError, UsageError


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return ``options.module`` as a source; its digest is that of its state dict's names, dtypes, shapes and bytes."""
    module, state = options.module, options.module.state_dict()
    try:  # what a module adds itself may be no tensor
        held = {name: each.cpu() for name, each in state.items() if isinstance(each, torch.Tensor)}
        held = {name: each.contiguous() if each.layout is torch.strided else each for name, each in held.items()}
    except (ValueError, NotImplementedError) as error:  # a lazy module that has not run; the meta device
        raise SourceError(f"{options.source}: its weights have no values yet: {first_line(error)}") from None
    tensors = torch_file.to_numpy(options.source, held)
    if not tensors:
        raise SourceError(f"{options.source}: has neither parameters nor buffers, so there is nothing to convert")
    checkpoint = Checkpoint("torch-module", digest_tensors(tensors), tensors)
    advance(checkpoint.nbytes)
    return in_module(options, checkpoint, _copied(options, module), precision_notes(options, tensors))


def _copied(options: Options, module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of ``module`` on the CPU, in fp32; parameters that are so already share the caller's memory.

    Buffers are copied, because a forward pass may write to them; as are tables that it renormalises (``max_norm``).
    """
    written = {id(each.weight) for each in module.modules() if getattr(each, "max_norm", None) is not None}
    kept: dict[int, object] = {}
    for parameter in module.parameters():
        plain = parameter.detach().cpu()
        plain = plain.clone() if id(parameter) in written else plain
        plain = plain.float() if plain.is_floating_point() else plain
        kept[id(parameter)] = torch.nn.Parameter(plain, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        kept[id(buffer)] = buffer.detach().cpu().clone()
    try:
        copied = copy.deepcopy(module, kept)
    except Exception as error:  # the user's classes may raise anything
        raise UsageError(
            f"{options.source}: copy.deepcopy cannot copy the module, which conversion works on: {first_line(error)}"
        ) from error
    narrow = any(each.is_floating_point() and each.dtype is not torch.float32 for each in module.parameters())
    return copied.float() if narrow else copied  # its buffers too
