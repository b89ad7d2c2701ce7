"""Reads a Lightning checkpoint as a source.

``--model`` builds a module from the file's hyper-parameters, and the file's weights fill it.
"""

from __future__ import annotations

from dataclasses import replace

from bf16kit.messages.errors import UsageError
from converter.options import Options
from converter.read.detect import Kind
from converter.read.readers import weights
from converter.read.readers.common import Advance, exported_source, inputs_of
from converter.source import Checkpoint, Source, digest_files


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return the checkpoint as a source; a torch file that only mentions Lightning is read like any torch file."""
    from converter.read import hyperparameters, lightning_file, precisions, prefixes, statedict
    from converter.read.torch.onnx_export import adapt, not_served

    found = lightning_file.read_file(options.source, trust_pickle=options.trust_code)
    if found is None:
        if options.weights is not None:
            raise UsageError(f"--weights: is for Lightning checkpoints, and {options.source} is not one")
        return weights.read(options, Kind.TORCH_ZIP, advance)
    tensors, weights_notes = found.choose(options.weights)
    precisions.check_range(options.source, tensors)
    arguments, argument_notes = hyperparameters.arguments(
        statedict.factory_of(options), options.model_args, found.hyper_parameters, found.argument
    )
    with_arguments = replace(options, model_args=arguments)
    prefix = None if options.weights == "ema" and found.averaged is not None else options.weights
    outline = statedict.outline(with_arguments) if found.hyper_parameters else None
    if outline is not None:  # check this before allocating the memory that the file's arguments imply
        prefixes.select(outline, tensors, prefix)
    module = statedict.build(with_arguments)
    prefix_notes = prefixes.fit_behind_prefix(module, tensors, prefix)
    checkpoint = Checkpoint("lightning", digest_files([options.source], advance), tensors)
    model = adapt(statedict.in_fp32(module), inputs_of(options))
    notes = (
        *found.notes,
        *weights_notes,
        *argument_notes,
        *prefix_notes,
        *not_served(model.outputs, model.left_out),
        *precisions.notes(tensors, residual=options.residual),
    )
    return replace(exported_source(checkpoint, model, None), notes=notes)
