"""Functions for ``--samples feeders:NAME``, valid and invalid."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np


def three() -> Iterator[dict[str, Any]]:
    """Return three feeds of the MLP's input, of 1, 2 and 3 rows."""
    random = np.random.default_rng(5)
    return ({"x": random.standard_normal((rows, 16)).astype(np.float32)} for rows in (1, 2, 3))


def endless() -> Iterator[dict[str, Any]]:
    return ({"x": np.full((1, 16), i, np.float32)} for i in itertools.count())


def nothing() -> list[dict[str, Any]]:
    return []


def failing() -> Iterator[dict[str, Any]]:
    yield {"x": np.zeros((1, 16), np.float32)}
    raise OSError("the disk of the user's own data set")


def arrays() -> list[Any]:
    return [np.zeros((1, 16), np.float32)]


def doubles() -> list[dict[str, Any]]:
    return [{"x": np.zeros((1, 16))}]


def ragged() -> list[dict[str, Any]]:
    return [{"x": [[1.0, 2.0], [3.0]]}]
