"""Reads JAX checkpoints, Orbax directories and Flax msgpack files; a map fills the model with their leaves."""

from __future__ import annotations

from pathlib import Path

from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.wording import quoted
from converter.options import Options
from converter.read.detect import Kind
from converter.read.readers import mapped
from converter.read.readers.common import Advance
from converter.source import Array, Checkpoint, Source, digest_files

# Top-level keys of a training state for the optimizer's data, which is two or three times as large as the weights.
_TRAINING = ("opt_state", "optimizer", "optimizer_state")


def read(options: Options, kind: Kind, advance: Advance) -> Source:
    """Return the checkpoint as a source; :class:`UsageError` if ``--model`` is missing."""
    from converter.read import precisions

    if options.model is None:
        raise UsageError(
            f"{options.source}: holds weights but no architecture; name it with --model pkg.mod:factory (a function or"
            " class that returns the torch module) or --model graph.onnx"
        )
    leaves, left_out, files, chosen = _leaves(options, kind)
    if not leaves:
        raise SourceError(f"{options.source}: holds no arrays other than those of an optimizer")
    precisions.check_range(options.source, leaves)
    notes = [*chosen, *precisions.notes(leaves, residual=options.residual)]
    if left_out:
        keys = ", ".join(sorted({name.partition(".")[0] for name in left_out}))
        count = f"{len(left_out)} array{'' if len(left_out) == 1 else 's'}"
        notes.append(f"left out: {count} of the training state under {keys}; restore does not give them back")
    form = "orbax" if kind is Kind.ORBAX else "flax-msgpack"
    return mapped.read(options, Checkpoint(form, digest_files(files, advance), leaves), notes)


def _leaves(options: Options, kind: Kind) -> tuple[dict[str, Array], tuple[str, ...], list[Path], list[str]]:
    """Return the model's arrays by name, the other arrays' names, their files, and a note on the chosen item."""
    from converter.read import flax_file
    from converter.read.orbax import arrays, layout

    scratch = options.target.path.parent
    if kind is Kind.ORBAX:
        item = layout.locate(options.source, options.step, options.item)
        return *arrays.read_item(item, _of_the_model, scratch), _chosen(options, item)
    return *flax_file.read_file(options.source, _of_the_model, scratch), [options.source], []


def _chosen(options: Options, item: Path) -> list[str]:
    """Return a note on which item was read, if the source is a directory of steps or items."""
    if item == options.source:
        return []
    where = quoted(str(item.relative_to(options.source)))
    return [f"the weights are those of {where} in {options.source.name}; --step and --item choose others"]


def _of_the_model(name: str) -> bool:
    keys = name.split(".")
    return keys[0] not in _TRAINING or "target" in keys[1:2]  # flax.optim stored the weights in its optimizer
