"""The user's batches: yielded by a function, checked against the model's inputs, and the same for every run of a seed.

A batch is a mapping with an array per input, or a sequence of them in order; for a model with one input, the array
alone is enough. Labels may follow and are ignored. Arrays are numpy's or torch's.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bf16kit.messages.errors import InvalidRequest, UsageError
from bf16kit.numerics.tensors import TensorSpec, check_feeds, describe
from converter.options import import_callable
from converter.process.quiet import describe_user_error, first_line
from converter.source import Feeds

_END = object()


class Loader:
    """A loader named by ``flag``: a function that returns one pass over the data each time it is called.

    Random generators are seeded before each batch, by ``seed`` and its number. So computations between two batches do
    not change the batches, and a resumed recovery sees the same ones.
    """

    def __init__(self, flag: str, given: str, inputs: Sequence[TensorSpec], seed: int) -> None:
        self._name, self._function = f"{flag} {given}", import_callable(flag, given)
        self._inputs, self._seed = tuple(inputs), seed % 2**64
        self._expected = ", ".join(f"{spec.name} {spec.dtype}{describe(spec.shape)}" for spec in inputs)

    def batches(self, number: int) -> Iterator[Feeds]:
        """Yield the batches of pass ``number``.

        Raises :class:`UsageError` for a pass without a batch, for a batch that does not match the model, and for any
        error in the user's code.
        """
        with self._seeded(number, 0, "when called"):
            batches = iter(self._function())
        for index in itertools.count():
            where = f"batch {index}" + (f" of pass {number + 1}" if number else "")
            with self._seeded(number, index + 1, where):
                item = next(batches, _END)
            if item is not _END:
                yield self._feeds(item, f"{self._name}: {where}")
            elif index:
                return
            else:
                raise UsageError(
                    f"{self._name}: yielded nothing in pass {number + 1}; each time it is called it must return a new"
                    f" iterable of batches of {self._expected}"
                )

    @contextmanager
    def _seeded(self, number: int, index: int, where: str) -> Iterator[None]:
        """Run the user's code, which may raise anything; report the error with the user's own file and line."""
        seed = int(np.random.SeedSequence([self._seed, number, index]).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        except (Exception, SystemExit) as error:
            raise UsageError(f"{self._name}: failed, {where}: {describe_user_error(error)}") from error

    def _feeds(self, item: Any, where: str) -> Feeds:
        names = [spec.name for spec in self._inputs]
        parts = item if isinstance(item, tuple | list) else [item]
        if len(parts) in (1, 2) and isinstance(parts[0], Mapping):
            fields = {str(name): value for name, value in parts[0].items() if name in names or name != "labels"}
        elif len(parts) in (len(names), len(names) + 1):
            fields = dict(zip(names, parts, strict=False))
        else:
            raise UsageError(
                f"{where}: has {len(parts)} parts; the model takes {self._expected}, and labels may follow"
            )
        try:
            feeds = {n: np.asarray(v.detach().cpu() if hasattr(v, "detach") else v) for n, v in fields.items()}
            check_feeds(self._inputs, feeds)
        except (InvalidRequest, ValueError, TypeError, RuntimeError) as error:  # such as ragged lists
            raise UsageError(f"{where}: {error if isinstance(error, InvalidRequest) else first_line(error)}") from None
        for name, array in feeds.items():
            if array.size == 0 or (array.dtype.kind in "fV" and np.isnan(array).any()):  # V: bfloat16
                wrong = "holds NaN" if array.size else f"has no elements ({describe(array.shape)})"
                raise UsageError(f"{where}: input {name!r} {wrong}; leave it out")
        return {name: np.asarray(feeds[name], order="C") for name in names}
