"""The real server, wired as in production, with artifacts on disk; and tritonclient as it is installed.

The clients know only the server's address.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_artifact, write_lookup, write_mlp
from inprocess import running

from bf16kit.numerics.tensors import TensorSpec

LOADED = ("types", "mlp", "lookup")


def _write_types(target: Path) -> None:
    """Write a model with ``doubled = 2·x`` in fp32, and with int32, int64 and bool outputs that negate their inputs."""
    batch: tuple[str, int] = ("batch", 4)
    inputs: dict[str, type[np.generic]] = {"x": np.float32, "small": np.int32, "large": np.int64, "flag": np.bool_}
    write_artifact(
        target,
        lambda weight: (
            f"doubled = MatMul (x, {weight('w')}) negated = Neg (small) opposite = Neg (large) denied = Not (flag)"
        ),
        {"w": np.eye(4, dtype=np.float32) * 2},
        [TensorSpec(name, dtype.__name__.rstrip("_"), batch) for name, dtype in inputs.items()],
        [
            TensorSpec("doubled", "float32", batch, "regression"),
            TensorSpec("negated", "int32", batch),
            TensorSpec("opposite", "int64", batch),
            TensorSpec("denied", "bool", batch),
        ],
        {name: np.ones((2, 4), dtype) for name, dtype in inputs.items()},
    )


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    _write_types(root / "types" / "1")
    write_mlp(root / "mlp" / "1")
    write_mlp(root / "mlp" / "3")
    (root / "mlp" / "serving.yaml").write_text("version_policy: all\nmax_batch_size: 8\n")
    write_lookup(root / "lookup" / "1")
    return root


@pytest.fixture(scope="session")
def memory_address(repository: Path) -> Iterator[str]:
    """Yield the address of a server that lets clients register shared memory with names that begin with "contract"."""
    with running(repository, *LOADED, shared_memory="contract") as where:
        yield where


@pytest.fixture(scope="session")
def address(repository: Path) -> Iterator[str]:
    """Yield ``host:port`` of a server whose models have loaded."""
    with running(repository, *LOADED) as where:
        yield where
