"""What every test needs: profiles of hypothesis, the kernel under test, turns of ``pytest -n``, and few live objects.

Tests run side by side in several processes under ``pytest -n``; those marked ``alone`` wait for a turn without others.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from madeonce import keep_what_libraries_made
from turns import Turns

from bf16kit.runtime.ort import kernel

# A deadline per example fails on a busy machine, and tests nothing about the code.
# In CI every run tries the same examples: a new example must not fail a commit that has nothing to do with it.
# `make test-weekly` (--hypothesis-profile=weekly) looks for such examples, and prints how to repeat one that fails.
settings.register_profile("bf16kit", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.register_profile("weekly", deadline=None, derandomize=False, max_examples=2000, print_blob=True)
settings.load_profile("bf16kit")

# Tests fork processes that do not use gRPC (fuzzing/confined.py); with its handlers around fork() the forked process
# sometimes aborts. Tests that start servers and clients start new programs instead.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# kernels/tests/in_onnxruntime.sh runs the kernel's tests on a library that it has built with sanitizers.
if os.environ.get("BF16KIT_TEST_KERNEL"):
    kernel.LIBRARY = Path(os.environ["BF16KIT_TEST_KERNEL"])

_modules_at_last_freeze = 0
_DIRECTORY, _TURNS = pytest.StashKey[str](), pytest.StashKey[Turns]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give each worker process the directory of turns. Runs in the main process (a hook of pytest-xdist)."""
    if _DIRECTORY not in node.config.stash:
        node.config.stash[_DIRECTORY] = tempfile.mkdtemp(prefix="bf16kit-turns-")
    node.workerinput["turns"] = node.config.stash[_DIRECTORY]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # One process per core: torch, which is not yet imported, must not start threads on all cores in each.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        config.stash[_TURNS] = Turns(Path(config.workerinput["turns"]))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _TURNS in config.stash:
        config.stash[_TURNS].close()
    if _DIRECTORY in config.stash:
        shutil.rmtree(config.stash[_DIRECTORY])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked ``alone``, including its fixtures, while no other test runs."""
    turns = item.config.stash.get(_TURNS, None)
    if turns is None:
        return (yield)
    with turns.turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(autouse=True)
def _what_libraries_make_is_made_once() -> None:
    """Save time after a test has imported large libraries."""
    global _modules_at_last_freeze
    if len(sys.modules) > _modules_at_last_freeze + 50:
        keep_what_libraries_made()
        _modules_at_last_freeze = len(sys.modules)
