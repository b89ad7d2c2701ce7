"""Checkpoints of JAX: Orbax's directories and Flax's msgpack files, whose leaves fill a model by a map."""

from __future__ import annotations

from pathlib import Path

from bf16kit.errors import SourceError, UsageError
from converter.model import Array, Checkpoint, Source, digest_files
from converter.options import Options
from converter.sources.detect import Kind
from converter.sources.readers import mapped
from converter.sources.readers.common import Advance

# Keys at the top of a training state that hold what the optimizer needs, two or three times the weights.
_TRAINING = ("opt_state", "optimizer", "optimizer_state")


def read(options: Options, kind: Kind, advance: Advance) -> Source:
    """The checkpoint as a source; :class:`UsageError` where ``--model`` is missing."""
    from converter.sources import precisions

    if options.model is None:
        raise UsageError(
            f"{options.source}: holds weights but no architecture; name it with --model pkg.mod:factory (a function or"
            " class that returns the torch module) or --model graph.onnx"
        )
    leaves, left_out, files = _leaves(options, kind)
    if not leaves:
        raise SourceError(f"{options.source}: holds no arrays but those of an optimizer")
    precisions.check_range(options.source, leaves)
    notes = [*precisions.notes(leaves, residual=options.residual)]
    if left_out:
        keys = ", ".join(sorted({name.partition(".")[0] for name in left_out}))
        notes.append(f"left out: {len(left_out)} arrays of training under {keys}; restore does not give them back")
    form = "orbax" if kind is Kind.ORBAX else "flax-msgpack"
    return mapped.read(options, Checkpoint(form, digest_files(files, advance), leaves), notes)


def _leaves(options: Options, kind: Kind) -> tuple[dict[str, Array], tuple[str, ...], list[Path]]:
    """The arrays of the model by name, the names of the others, and the files they are in."""
    from converter.sources import flax_file
    from converter.sources.orbax import arrays, layout

    scratch = options.target.path.parent
    if kind is Kind.ORBAX:
        return arrays.read_item(layout.locate(options.source, options.step, options.item), _of_the_model, scratch)
    return *flax_file.read_file(options.source, _of_the_model, scratch), [options.source]


def _of_the_model(name: str) -> bool:
    keys = name.split(".")
    return keys[0] not in _TRAINING or "target" in keys[1:2]  # flax.optim kept the weights in its optimizer
