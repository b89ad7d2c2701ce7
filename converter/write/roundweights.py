"""Narrows one weight to bf16, a block of rows at a time: counts, rounds, and encodes what rounding removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bf16kit.numerics.residual import Encoder, Scale
from bf16kit.numerics.rounding import Census, Subnormals, census, to_bf16
from converter.graph.initializers import blocks, reader, rows_of


@dataclass(frozen=True, slots=True)
class Rounding:
    """The options for rounding weights to bf16; see :func:`bf16kit.numerics.rounding.to_bf16`."""

    subnormals: Subnormals = "keep"
    saturate: bool = False


NEAREST = Rounding()


@dataclass
class WeightRounding:
    """An fp32 ``tensor`` that is rounded into ``bf16``, of the same shape.

    ``census`` is complete after all blocks. ``on_progress`` is called with the fp32 bytes of each block.
    """

    tensor: ir.TensorProtocol
    bf16: NDArray[Any]
    rounding: Rounding
    on_progress: Callable[[int], None]
    census: Census = field(default_factory=Census)

    def blocks(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Round block by block; yield the rows of each block and their values before rounding."""
        for rows, array in blocks(self.tensor):
            self.census += census(array)
            place = rows_of(self.bf16, rows)
            to_bf16(array, subnormals=self.rounding.subnormals, saturate=self.rounding.saturate, out=place)
            yield rows, array
            self.on_progress(array.nbytes)

    def residual(
        self, original: ir.TensorProtocol, scale: Scale | None, low_bits: int = 16
    ) -> Iterator[bytes | memoryview]:
        """Yield the segment that restores ``original``, which is ``tensor`` without the ``scale`` folded into it.

        ``low_bits`` is how many bits of the low halves of its words may be nonzero.
        """
        encoder = Encoder(self.bf16.shape, scale, 16 if scale is not None else low_bits)
        read = None if original is self.tensor else reader(original)
        for rows, array in self.blocks():
            values = array if read is None else np.asarray(read(rows), order="C")
            yield from encoder.rows(values, rows_of(self.bf16, rows))
        yield from encoder.finish()
