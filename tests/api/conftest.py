"""A small module, samples for it, and its artifact, converted once for all tests that only read it."""

import numpy as np
import pytest
import torch
from architectures import Mlp

import bf16kit
from bf16kit.numerics.tensors import Array


@pytest.fixture(scope="session")
def x() -> Array:
    return np.random.default_rng(0).normal(size=(128, 16)).astype(np.float32)


@pytest.fixture
def net() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


@pytest.fixture(scope="session")
def converted(x: Array, tmp_path_factory: pytest.TempPathFactory) -> bf16kit.Conversion:
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("repository") / "mlp" / "1"
    return bf16kit.convert(Mlp(), out=out, samples=x, output={"output": "logits"}, report=False)
