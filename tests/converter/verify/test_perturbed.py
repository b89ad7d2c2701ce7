"""More samples are made of the given ones where these are too few to judge slices and agreement by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from bf16kit.drift.budget import Budget
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from converter.source import Feeds, Oracle
from converter.verify.random_samples import SAMPLES, with_enough
from converter.verify.samples import Samples

LOGITS = (TensorSpec("y", "float32", ("batch", 5), "logits"),)
OTHER = (TensorSpec("y", "float32", ("batch", 5)),)
Inputs = dict[str, NDArray[np.generic]]


def oracle(reject: int | None = None, nan: int | None = None) -> Oracle:
    """Return an oracle that fails on feed number ``reject``, and gives NaN for feed number ``nan``."""

    def outputs(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        for number, feed in enumerate(feeds):
            if number == reject:
                raise RuntimeFailure("out of range")
            rows = len(next(iter(feed.values())))
            yield {"y": np.full((rows, 5), np.nan if number == nan else 1.0, np.float32)}

    return Oracle(outputs, "a test")


def enough(feeds: Sequence[Inputs], outputs: Sequence[TensorSpec] = OTHER, how: Oracle | None = None) -> Samples:
    given = Samples(tuple(feeds), "the test")
    how = how or oracle()
    return with_enough(given, inputs_of(given), outputs, how(given.feeds[:1]), how, Budget(), 0)


def inputs_of(samples: Samples) -> list[TensorSpec]:
    first = samples.feeds[0]
    return [TensorSpec(name, array.dtype.name, ("n", *array.shape[1:])) for name, array in first.items()]


def floats(count: int, rows: int = 1) -> list[Inputs]:
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((rows, 4)).astype(np.float32)} for _ in range(count)]


def test_slices_need_a_few_samples_and_agreement_a_hundred_rows() -> None:
    """With fewer than 1 ÷ (1 − 0.99) rows, a single one that differs breaks the bound."""
    assert [len(enough(floats(n)).feeds) for n in (1, 5, 16, 40)] == [SAMPLES, SAMPLES, SAMPLES, 40]
    assert len(enough(floats(4, rows=8)).feeds) == 4
    assert len(enough(floats(3), LOGITS).feeds) == 100
    assert len(enough(floats(3, rows=8), LOGITS).feeds) == 13


def test_the_given_samples_stay_first_and_the_origin_says_what_was_made() -> None:
    given = floats(3)
    found = enough(given)
    assert found.given == tuple(given)
    assert found.made == SAMPLES - 3
    assert found.described == "the test, and 13 made of them by perturbation"
    assert enough(floats(16)).described == "the test"


def test_integers_stay_valid_indices_and_masks_stay() -> None:
    tokens, mask = np.array([[5, 900, 31, 7, 2]]), np.array([[1, 1, 1, 0, 0]])
    found = enough([{"ids": tokens, "mask": mask, "length": np.array([5])}])
    made = found.feeds[1:]
    assert all(np.isin(feed["ids"], tokens).all() for feed in made)
    assert any((feed["ids"] != tokens).any() for feed in made)
    assert all((feed["mask"] == mask).all() and feed["length"] == 5 for feed in made)


def test_the_same_seed_makes_the_same_samples() -> None:
    one, other = enough(floats(3)), enough(floats(3))
    for a, b in zip(one.feeds, other.feeds, strict=True):
        np.testing.assert_array_equal(a["x"], b["x"])


@pytest.mark.parametrize(
    ("how", "made"),
    [(oracle(nan=2), SAMPLES - 3), (oracle(nan=0), SAMPLES - 4), (oracle(reject=5), 10), (oracle(reject=0), 0)],
)
def test_samples_that_the_source_rejects_are_replaced_once_by_smaller_steps(how: Oracle, made: int) -> None:
    given = Samples(tuple(floats(3)), "the test")
    assert with_enough(given, inputs_of(given), OTHER, oracle()(given.feeds), how, Budget(), 0).made == made


def test_a_source_that_cannot_be_run_keeps_its_samples() -> None:
    given = Samples(tuple(floats(3)), "the test")
    assert with_enough(given, inputs_of(given), LOGITS, [], oracle(), Budget(), 0) is given
