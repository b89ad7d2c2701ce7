"""A store of weights in which a test can see what was asked for."""

import numpy as np
from numpy.typing import NDArray

from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, Fill


class KeptWeights:
    """A :class:`~bf16kit.runtime.memory.weightstore.WeightStore` that keeps every array, by key and size."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[str, int], NDArray[np.uint8]] = {}

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        if (key, size) not in self.arrays:
            self.arrays[key, size] = PRIVATE_STORE.get(key, size, fill)
        return self.arrays[key, size]
