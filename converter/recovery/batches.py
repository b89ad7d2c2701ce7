"""The user's batches: yielded by a function, checked against the model's inputs, and the same for every run of a seed.

A batch is a mapping with an array per input, with or without ``labels``. It may also be a sequence of the inputs in
order, optionally followed by labels. For a model with one input, the array alone is enough. Arrays are numpy's or
torch's.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from bf16kit.messages.errors import InvalidRequest, UsageError
from bf16kit.numerics.tensors import TensorSpec, check_feeds, describe
from converter.process.imports import import_callable
from converter.process.quiet import first_line
from converter.process.usererror import describe_user_error
from converter.source import Array, Feeds

LABELS = "labels"
IGNORED = -100  # torch's value for a label that does not count


@dataclass(frozen=True, slots=True)
class Batch:
    """An array per input, and the labels of its rows if the loader gave any; ``location`` names it in messages."""

    feeds: Feeds
    labels: Array | None = None
    location: str = "batch"


def check_labels(batch: Batch, output: str, shape: Sequence[int]) -> None:
    """Check that labels match logits of ``shape`` [..., classes]; raise :class:`UsageError` if they do not."""
    labels, classes = batch.labels, shape[-1]
    if labels is None:
        return
    if labels.shape != tuple(shape[:-1]):
        raise UsageError(
            f"{batch.location}: labels have shape {list(labels.shape)}, expected {list(shape[:-1])} for output"
            f" {output!r} of shape {list(shape)}"
        )
    invalid = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
    if invalid.size:
        raise UsageError(
            f"{batch.location}: label {invalid[0]} is not one of the {classes} classes of output {output!r}, expected 0"
            f" to {classes - 1}, or {IGNORED} for a row to ignore"
        )


class Loader:
    """A loader named by ``flag``: a function that returns one pass over the data each time it is called.

    It draws random numbers from its own generators, seeded by ``seed`` and the number of the pass. So computations
    between two batches do not change the batches, and a resumed recovery sees the same ones.
    """

    def __init__(self, flag: str, given: str, inputs: Sequence[TensorSpec], seed: int) -> None:
        self._name = f"{flag} {given}"
        self._function: Callable[[], Any] = import_callable(flag, given)
        self._inputs = tuple(inputs)
        self._seed = seed

    def endless(self, skip: int = 0) -> Iterator[Batch]:
        """Yield batches without end, pass after pass, after skipping the first ``skip``.

        Raises :class:`UsageError` for a pass without a batch, for a batch that does not match the model, and for any
        error in the user's code.
        """
        for number in itertools.count():
            empty = True
            for batch in self._pass(number):
                empty = False
                if skip:
                    skip -= 1
                else:
                    yield batch
            if empty:
                raise UsageError(self._empty_message(number))

    def first(self, max_batches: int) -> list[Batch]:
        """Return the first batches of the first pass, at most ``max_batches``; raises as :meth:`endless` does."""
        found = list(itertools.islice(self._pass(0), max_batches))
        if not found:
            raise UsageError(self._empty_message(0))
        return found

    def _empty_message(self, number: int) -> str:
        if number == 0:
            return f"{self._name}: yielded nothing; it must give batches of {_inputs(self._inputs)}"
        return (
            f"{self._name}: yielded nothing in pass {number + 1}; let it return a new iterable each time it is"
            " called, or lower --steps to the number of batches of one pass"
        )

    def _pass(self, number: int) -> Iterator[Batch]:
        random_state = _RandomState(self._seed + number)
        with self._user_errors("when called"), random_state.restored():
            batches = self._iterator(self._function())
        for index in itertools.count():
            position = f"batch {index}" if number == 0 else f"batch {index} of pass {number + 1}"
            with self._user_errors(position), random_state.restored():
                item = next(batches, _END)
            if item is _END:
                return
            yield self._batch(item, f"{self._name}: {position}")

    def _iterator(self, item: Any) -> Iterator[Any]:
        if not hasattr(item, "__iter__") and not hasattr(item, "__getitem__"):
            raise UsageError(
                f"{self._name}: gave {type(item).__name__}, expected batches to iterate over: a generator, a list or a"
                f" DataLoader of {_inputs(self._inputs)}"
            )
        return iter(item)

    @contextmanager
    def _user_errors(self, position: str) -> Iterator[None]:
        """Run the user's code, which may raise anything; report the error with the user's own file and line."""
        try:
            yield
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(f"{self._name}: failed, {position}: {describe_user_error(error)}") from error

    def _batch(self, item: Any, location: str) -> Batch:
        feeds, labels = self._parts(item, location)
        try:
            check_feeds(self._inputs, feeds)
        except InvalidRequest as error:
            raise UsageError(f"{location}: {error}") from None
        if any(array.size == 0 for array in feeds.values()):
            shapes = ", ".join(f"{name}{describe(array.shape)}" for name, array in feeds.items())
            raise UsageError(f"{location}: has no elements ({shapes}); leave empty batches out")
        for name, array in feeds.items():
            _check_numbers(location, name, array)
        return Batch({spec.name: np.asarray(feeds[spec.name], order="C") for spec in self._inputs}, labels, location)

    def _parts(self, item: Any, location: str) -> tuple[Feeds, Array | None]:
        names = [spec.name for spec in self._inputs]
        labels = None
        if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Mapping):
            item, labels = item
        if isinstance(item, Mapping):
            fields = dict(item)
            if LABELS not in names and labels is None:
                labels = fields.pop(LABELS, None)
        elif isinstance(item, tuple | list):
            if len(item) not in (len(names), len(names) + 1):
                raise UsageError(
                    f"{location}: has {len(item)} parts; the model takes {_inputs(self._inputs)}, and labels may follow"
                )
            fields = dict(zip(names, item, strict=False))
            labels = item[len(names)] if len(item) > len(names) else None
        elif len(names) == 1:
            fields = {names[0]: item}
        else:
            raise UsageError(
                f"{location}: is {type(item).__name__}; expected a mapping of an array per input:"
                f" {_inputs(self._inputs)}"
            )
        feeds = {str(name): _array(location, str(name), value) for name, value in fields.items()}
        return feeds, None if labels is None else _labels(location, labels)


_END = object()


class _RandomState:
    """The state of Python's, numpy's and torch's random generators while the user's loader runs."""

    def __init__(self, seed: int) -> None:
        with _restoring():
            _seed(seed)
            self._state = _state()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the loader's generators as this context last left them."""
        with _restoring():
            _set_state(self._state)
            try:
                yield
            finally:
                self._state = _state()


def seed_all(seed: int) -> None:
    """Seed the generators of Python, numpy and torch; ``seed`` may be of any size."""
    _seed(seed)


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


_State = tuple[Any, Any, Any]


def _state() -> _State:
    import torch

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_state(state: _State) -> None:
    import torch

    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


@contextmanager
def _restoring() -> Iterator[None]:
    before = _state()
    try:
        yield
    finally:
        _set_state(before)


def _array(location: str, name: str, value: Any) -> Array:
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists, tensors of another kind
        raise UsageError(f"{location}: input {name!r} is not an array: {first_line(error)}") from None


def _check_numbers(location: str, name: str, array: Array) -> None:
    """Reject NaN. Infinite values may be intended: a mask that is added to scores holds them."""
    if array.dtype.kind not in "fV":  # V: bfloat16
        return
    nan = np.isnan(array)
    if nan.any():
        first = [int(index) for index in np.argwhere(nan)[0]]
        raise UsageError(
            f"{location}: input {name!r} holds NaN in {np.count_nonzero(nan)} of {array.size} elements, the first at"
            f" {first}; leave out such samples, or replace the NaN"
        )


def _labels(location: str, value: Any) -> Array:
    labels = _array(location, LABELS, value)
    if labels.dtype.kind not in "iu":
        raise UsageError(f"{location}: labels are {labels.dtype.name}; expected class numbers as int64")
    return labels.astype(np.int64)


def _inputs(inputs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.dtype}{describe(spec.shape)}" for spec in inputs)
