"""A server that breaks one rule must fail the check of that rule; a server that breaks none must fail no check."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import grpc
import pytest
from extensiontwists import EXTENSIONS
from oipserver import Twist, honest, oip_server
from twists import INFERENCE, RAW, TYPED, never_refuses, refuses_as

from oip_conformance.checks import CHECKS
from oip_conformance.models import Model, discover, preference
from oip_conformance.reports import Outcome, Result
from oip_conformance.runner import run, select_checks
from oip_conformance.session import Options, Session
from oip_conformance.suite import Level
from oip_conformance.target import Target, connect

WRONG = {**INFERENCE, **RAW, **TYPED, **EXTENSIONS}
NAMES = ["echo", "kinds", "typed", "loose", "maybe"]
#: Checks of gRPC itself, which no changed response can fail: compression, deadlines and cancelled calls.
OF_GRPC = {"infer.compressed", "call.deadline", "call.cancelled"}
REFUSED = [check.id[: -len("/status")] for check in CHECKS if check.id.endswith("/status")]
LOADS = [check.id for check in CHECKS if check.id.startswith("control.load-")]


def described(twist: Twist) -> list[Model]:
    """Return the models of a server, as it describes them."""
    with oip_server(twist) as address, connect(address) as channel:
        return sorted(discover(Target(channel), NAMES, {}), key=preference)


@cache
def described_rightly() -> list[Model]:
    return described(honest)


def tried(
    twist: Twist, only: Sequence[str] = (), *, lenient: bool = False, answers_anything: bool = False
) -> dict[str, Result]:
    """Run the suite, or some of its checks, on a server with a twist.

    The models are those of a server without a twist, unless the checks are about the models.
    """
    about_models = len(only) == 1 and only[0].startswith(("model.metadata", "config."))
    models = described(twist) if about_models else described_rightly()
    declared = frozenset(["sequence", *(check.needs for check in CHECKS if check.needs)])
    with (
        oip_server(twist, lenient=lenient, answers_anything=answers_anything) as address,
        connect(address) as channel,
    ):
        options = Options("typed", same_host=True, dangerous=True, patience=0.5)
        session = Session(Target(channel), models[0], models, declared, options)
        return {result.check.id: result for result in run(session, select_checks(CHECKS, only, ()))}


def test_a_correct_server_passes_every_check() -> None:
    results = tried(honest)
    assert not [r for r in results.values() if r.outcome in (Outcome.FAILED, Outcome.WARNED)]
    skipped = {id for id, r in results.items() if r.outcome is Outcome.SKIPPED}
    assert skipped == {"request.no-model/text", "memory.cuda-no-handle/text"}  # these have no word to look for


@pytest.mark.parametrize("wrong", WRONG)
def test_the_check_of_a_rule_detects_its_fault(wrong: str) -> None:
    twist, ids = WRONG[wrong]
    for id, result in tried(twist, ids).items():
        if id in ids:
            broken = Outcome.WARNED if result.check.level is Level.SHOULD else Outcome.FAILED
            assert result.outcome is broken, result
            assert result.expected
            assert result.actual


def test_every_rejection_check_detects_a_server_that_rejects_nothing() -> None:
    results = tried(never_refuses, [*REFUSED, *LOADS, "health.unknown-service"])
    passed = [id for id in (*REFUSED, *LOADS) if results[id].outcome is not Outcome.FAILED]
    assert not passed
    assert results["health.unknown-service"].outcome is Outcome.WARNED


def test_rejections_with_a_wrong_status_are_detected() -> None:
    results = tried(refuses_as(grpc.StatusCode.UNKNOWN, None), REFUSED)
    passed = [id for id in REFUSED if results[f"{id}/status"].outcome is not Outcome.FAILED]
    assert not passed
    assert not [id for id in REFUSED if results[id].outcome is Outcome.FAILED]


def test_rejections_with_a_useless_message_are_reported() -> None:
    results = tried(refuses_as(None, "no"), REFUSED)
    texts = [result for id, result in results.items() if id.endswith("/text") and result.outcome is not Outcome.SKIPPED]
    assert len(texts) > 50
    assert {result.outcome for result in texts} == {Outcome.WARNED}


def test_a_server_that_accepts_any_bytes_is_detected() -> None:
    ids = ["server.garbage", "call.truncated", "call.announced-length"]
    results = tried(never_refuses, ids, lenient=True)
    assert {results[id].outcome for id in ids} == {Outcome.FAILED}


def test_a_server_that_responds_to_unknown_rpcs_is_detected() -> None:
    assert tried(honest, ["server.unknown-rpc"], answers_anything=True)["server.unknown-rpc"].outcome is Outcome.FAILED


def test_every_check_is_tested_with_a_wrong_server() -> None:
    proved = {id for _, ids in WRONG.values() for id in ids} | {*REFUSED, *LOADS} | OF_GRPC
    proved |= {"server.unknown-rpc", "server.garbage", "call.truncated", "call.announced-length"}
    proved |= {"health.unknown-service"}
    assert not {check.id for check in CHECKS if "/" not in check.id} - proved


def test_ids_are_unique_and_every_check_has_a_rule_and_a_source() -> None:
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    assert all(check.rule.endswith((".", "status.", "wrong.")) and check.source for check in CHECKS)
