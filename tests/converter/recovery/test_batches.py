"""The user's batches: all forms are accepted, the same seed gives the same batches, and mistakes are named."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import recovering
import torch

from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.recovery.batches import Loader, check_labels

X = (TensorSpec("x", "float32", ("batch", 16)),)
TWO = (TensorSpec("a", "float32", ("batch", 2)), TensorSpec("b", "int64", ("batch",)))
_A, _B, _LABELS = np.ones((3, 2), np.float32), np.arange(3), np.array([2, 0, 1])


def loader(function: str, inputs: tuple[TensorSpec, ...] = X, seed: int = 0) -> Loader:
    return Loader("--data", f"recovering:{function}", inputs, seed)


@pytest.mark.parametrize(
    ("given", "labelled"),
    [
        ({"a": _A, "b": _B}, False),
        ({"a": _A, "b": _B, "labels": _LABELS}, True),
        (({"a": _A, "b": _B}, _LABELS), True),
        ((_A, _B), False),
        ([_A, _B, _LABELS], True),
        ({"a": torch.from_numpy(_A), "b": torch.from_numpy(_B), "labels": torch.from_numpy(_LABELS)}, True),
    ],
)
def test_a_batch_may_have_any_usual_form(monkeypatch: pytest.MonkeyPatch, given: Any, labelled: bool) -> None:
    monkeypatch.setattr(recovering, "three", lambda: [given])
    (batch,) = loader("three", TWO).first(5)
    assert np.array_equal(batch.feeds["a"], _A)
    assert np.array_equal(batch.feeds["b"], _B)
    assert (batch.labels is not None) == labelled
    if batch.labels is not None:
        assert np.array_equal(batch.labels, _LABELS)


def test_a_model_with_one_input_accepts_a_bare_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "three", lambda: [np.ones((2, 16), np.float32)])
    (batch,) = loader("three").first(1)
    assert batch.feeds["x"].shape == (2, 16)


def test_passes_over_the_data_repeat_without_end() -> None:
    found = [batch.feeds["x"] for batch in islice(loader("unlabelled").endless(), 20)]
    assert len(found) == 20
    assert np.array_equal(found[0], found[8])
    assert not np.array_equal(found[0], found[1])


def _drawn(seed: int, skip: int, count: int, *, disturbed: bool = False) -> Iterator[Any]:
    for batch in islice(loader("shuffled", seed=seed).endless(skip), count):
        if disturbed:  # as by a model with dropout, between two batches
            np.random.random(100)
            torch.rand(100)
            random.random()
        yield batch.feeds["x"]


def test_the_random_numbers_of_a_loader_depend_on_the_seed_alone() -> None:
    """They do not depend on computations between two batches, nor on the step at which a recovery is resumed."""
    expected = list(_drawn(1, 0, 20))
    assert all(map(np.array_equal, expected, _drawn(1, 0, 20, disturbed=True)))
    assert all(map(np.array_equal, expected[13:], _drawn(1, 13, 7, disturbed=True)))
    assert not np.array_equal(expected[0], next(_drawn(2, 0, 1)))
    assert not np.array_equal(expected[0], expected[8])  # another pass, another order


def test_the_global_random_generators_are_left_unchanged() -> None:
    np.random.seed(5)
    torch.manual_seed(5)
    before: Any = np.random.get_state(), torch.get_rng_state()
    list(_drawn(1, 0, 3))
    after: Any = np.random.get_state()
    assert after[2] == before[0][2]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nothing", "recovering:nothing: yielded nothing; it must give batches of x float32\\[batch,16\\]"),
        ("wide", "batch 0: input 'x' has shape \\[4, 17\\]"),
        ("doubles", "batch 0: input 'x' has dtype float64, expected float32"),
        ("empty", "batch 0: has no elements"),
        ("three", "batch 0: has 3 parts"),
        ("a_string", "batch 0: "),
        ("wrong_labels", "batch 0: labels are float32; expected class numbers as int64"),
        ("absent", "module recovering has no absent"),
    ],
)
def test_a_batch_that_does_not_fit_is_rejected_by_name(function: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        loader(function).first(1)


def _line(function: str, words: str) -> int:
    """Return the line number of ``words`` in the source of ``function``."""
    lines, first = inspect.getsourcelines(getattr(recovering, function))
    return first + next(place for place, line in enumerate(lines) if words in line)


@pytest.mark.parametrize(
    ("function", "place", "said", "raised"),
    [
        ("failing", "batch 1", "RuntimeError: the disk went away", ("failing", "raise")),
        ("exits", "batch 1", "it called sys.exit('no more data')", ("exits", "sys.exit")),
        ("failing_worker", "batch 0", "RuntimeError: the disk went away", ("_Failing", "raise")),
    ],
)
def test_the_error_of_a_loader_is_reported_with_its_own_file_and_line(
    function: str, place: str, said: str, raised: tuple[str, str]
) -> None:
    """This also holds if torch passed on the error from a worker process."""
    with pytest.raises(UsageError) as caught:
        loader(function).first(3)
    assert str(caught.value) == (
        f"--data recovering:{function}: failed, {place}: {said} ({recovering.__file__}, line {_line(*raised)})"
    )


def test_an_error_in_a_later_pass_names_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = iter([[{"x": np.ones((2, 16), np.float32)}], ["batch"]])
    monkeypatch.setattr(recovering, "three", lambda: next(passes))
    with pytest.raises(UsageError, match="three: batch 0 of pass 2: "):
        list(islice(loader("three").endless(), 2))


def test_a_function_that_gives_no_batches_is_rejected_with_what_is_expected() -> None:
    with pytest.raises(UsageError, match="reports: gave NoneType, expected batches to iterate over: a generator"):
        loader("reports").first(1)


def test_nan_is_rejected_with_its_position() -> None:
    said = r"batch 1: input 'x' holds NaN in 2 of 64 elements, the first at \[2, 5\]; leave out such samples"
    with pytest.raises(UsageError, match=said):
        loader("no_numbers").first(2)


def test_infinite_values_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "three", lambda: [np.full((2, 16), -np.inf, np.float32)])
    assert len(loader("three").first(1)) == 1


def test_labels_must_be_class_numbers() -> None:
    (batch,) = loader("strange_labels").first(1)
    said = r"strange_labels: batch 0: label 10 is not one of the 10 classes of output 'y', expected 0 to 9, or -100"
    with pytest.raises(UsageError, match=said):
        check_labels(batch, "y", (4, 10))
    check_labels(batch, "y", (4, 11))
    with pytest.raises(UsageError, match=r"labels have shape \[4\], expected \[5\] for output 'y' of shape \[5, 11\]"):
        check_labels(batch, "y", (5, 11))


def test_an_exhausted_iterator_is_not_reported_as_no_data() -> None:
    with pytest.raises(UsageError, match="yielded nothing in pass 2; let it return a new iterable each time"):
        list(islice(loader("once").endless(), 3))
