"""The suite notices: a server that breaks one rule fails the check of that rule; one that breaks none fails none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import grpc
import pytest
from extensiontwists import EXTENSIONS
from oipserver import Twist, honest, oip_server
from twists import INFERENCE, RAW, TYPED, never_refuses, refuses_as

from conformance.checks import CHECKS
from conformance.models import Model, discover, preference
from conformance.protocol import inference_pb2 as pb
from conformance.reports import Outcome, Result
from conformance.runner import chosen, run
from conformance.session import Options, Session
from conformance.suite import Level
from conformance.target import Target, connect

WRONG = {**INFERENCE, **RAW, **TYPED, **EXTENSIONS}
NAMES = ["echo", "kinds", "typed", "loose", "maybe"]
#: What no twist of an answer can break: that gRPC itself takes compression, deadlines and cancelled calls.
OF_GRPC = {"infer.compressed", "call.deadline", "call.cancelled"}
REFUSED = [check.id[: -len("/status")] for check in CHECKS if check.id.endswith("/status")]
LOADS = [check.id for check in CHECKS if check.id.startswith("control.load-")]


def described(twist: Twist) -> list[Model]:
    """The models of a server, as it describes them."""
    with oip_server(twist) as address, connect(address) as channel:
        return sorted(discover(Target(channel), NAMES, {}), key=preference)


@cache
def described_rightly() -> list[Model]:
    return described(honest)


def tried(
    twist: Twist, only: Sequence[str] = (), *, lenient: bool = False, answers_anything: bool = False
) -> dict[str, Result]:
    """The suite, or some checks of it, on a server with a twist. Its models are those of one without, unless the
    checks are about them."""
    about_models = len(only) == 1 and only[0].startswith(("model.metadata", "config."))
    models = described(twist) if about_models else described_rightly()
    declared = frozenset(["sequence", *(check.needs for check in CHECKS if check.needs)])
    with (
        oip_server(twist, lenient=lenient, answers_anything=answers_anything) as address,
        connect(address) as channel,
    ):
        options = Options("typed", same_host=True, dangerous=True, patience=0.5)
        session = Session(Target(channel), models[0], models, declared, options)
        return {result.check.id: result for result in run(session, chosen(CHECKS, only, ()))}


def test_a_server_without_fault_passes_every_check() -> None:
    results = tried(honest)
    assert not [r for r in results.values() if r.outcome in (Outcome.FAILED, Outcome.TOLD)]
    skipped = {id for id, r in results.items() if r.outcome is Outcome.SKIPPED}
    assert skipped == {"request.no-model/text", "memory.cuda-no-handle/text"}  # there is no word to look for


@pytest.mark.parametrize("wrong", WRONG)
def test_a_fault_is_noticed_by_the_check_of_its_rule(wrong: str) -> None:
    twist, ids = WRONG[wrong]
    for id, result in tried(twist, ids).items():
        if id in ids:
            broken = Outcome.TOLD if result.check.level is Level.SHOULD else Outcome.FAILED
            assert result.outcome is broken, result
            assert result.expected
            assert result.came


def test_a_server_that_refuses_nothing_is_noticed_by_every_check_of_a_refusal() -> None:
    results = tried(never_refuses, [*REFUSED, *LOADS, "health.unknown-service"])
    passed = [id for id in (*REFUSED, *LOADS) if results[id].outcome is not Outcome.FAILED]
    assert not passed
    assert results["health.unknown-service"].outcome is Outcome.TOLD


def test_refusals_by_another_status_are_noticed() -> None:
    results = tried(refuses_as(grpc.StatusCode.UNKNOWN, None), REFUSED)
    passed = [id for id in REFUSED if results[f"{id}/status"].outcome is not Outcome.FAILED]
    assert not passed
    assert not [id for id in REFUSED if results[id].outcome is Outcome.FAILED]


def test_refusals_that_name_nothing_are_told() -> None:
    results = tried(refuses_as(None, "no"), REFUSED)
    texts = [result for id, result in results.items() if id.endswith("/text") and result.outcome is not Outcome.SKIPPED]
    assert len(texts) > 50
    assert {result.outcome for result in texts} == {Outcome.TOLD}


def test_a_server_that_takes_any_bytes_is_noticed() -> None:
    ids = ["server.garbage", "call.truncated", "call.announced-length"]
    results = tried(never_refuses, ids, lenient=True)
    assert {results[id].outcome for id in ids} == {Outcome.FAILED}


def test_a_server_that_answers_unknown_rpcs_is_noticed() -> None:
    assert tried(honest, ["server.unknown-rpc"], answers_anything=True)["server.unknown-rpc"].outcome is Outcome.FAILED


def test_every_check_is_proved_by_a_wrong_server() -> None:
    proved = {id for _, ids in WRONG.values() for id in ids} | {*REFUSED, *LOADS} | OF_GRPC
    proved |= {"server.unknown-rpc", "server.garbage", "call.truncated", "call.announced-length"}
    proved |= {"health.unknown-service"}
    assert not {check.id for check in CHECKS if "/" not in check.id} - proved


def test_ids_are_unique_and_every_check_says_its_rule_and_its_source() -> None:
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    assert all(check.rule.endswith((".", "status.", "wrong.")) and check.source for check in CHECKS)


def test_a_message_of_ours_is_read_as_the_reference_reads_it() -> None:
    with oip_server() as address, connect(address) as channel:
        answer = Target(channel).call("ServerMetadata", pb.ServerMetadataRequest())
    assert (answer.message.name, answer.message.version) == ("echo", "1.0")
