"""A checkpoint's hyper-parameters become arguments of a factory, as far as its signature takes them."""

from __future__ import annotations

from typing import Any

import pytest

from converter.read.lightning import factory_arguments


def takes_two(width: int, depth: int = 1) -> None: ...
def takes_all(width: int, **others: Any) -> None: ...
def takes_one_mapping(config: dict[str, Any], depth: int = 1) -> None: ...
def takes_by_position(width: int, /) -> None: ...


FOUND = {"width": 8, "rate": 0.1}
_GIVEN = "hyper-parameters of the file passed to --model"
_OVERRULED = "--model-args in place of the file's hyper-parameters"
_LEFT = "hyper-parameters of the file that --model does not take"


@pytest.mark.parametrize(
    ("factory", "explicit", "argument", "given", "notes"),
    [
        (takes_two, {}, "", {"width": 8}, [f"{_GIVEN}: width=8", f"{_LEFT}: rate"]),
        (takes_two, {"width": 9}, "", {"width": 9}, [f"{_OVERRULED}: width", f"{_LEFT}: rate"]),
        (takes_two, {"depth": 2}, "kwargs", {"width": 8, "depth": 2}, [f"{_GIVEN}: width=8", f"{_LEFT}: rate"]),
        (takes_all, {}, "", FOUND, [f"{_GIVEN}: width=8, rate=0.1"]),
        (takes_one_mapping, {}, "config", {"config": FOUND}, [f"{_GIVEN}: config={FOUND}"]),
        (takes_one_mapping, {"config": {}}, "config", {"config": {}}, [f"{_OVERRULED}: config"]),
        (takes_by_position, {}, "", {}, [f"{_LEFT}: width, rate"]),
    ],
)
def test_the_factory_gets_the_arguments_that_its_signature_takes(
    factory: Any, explicit: dict[str, Any], argument: str, given: dict[str, Any], notes: list[str]
) -> None:
    older = {"hparams": {"width": 0, "rate": 0.2, "_class_path": "a.B", 3: 4}}
    loaded = older | {"hparams_name": argument, "hyper_parameters": FOUND}
    assert factory_arguments(factory, explicit, loaded) == (given, notes)
