"""The part of serving.yaml about live drift."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from service.drift.policy import Remote, ShadowPolicy


@pytest.mark.parametrize(
    ("text", "remote"),
    [
        ("grpc://localhost:8001/mlp", Remote("localhost:8001", "mlp", "")),
        ("grpcs://localhost:8001/mlp", Remote("localhost:8001", "mlp", "", tls=True)),
        ("grpc://10.0.0.7:1/a.b-c/12", Remote("10.0.0.7:1", "a.b-c", "12")),
        ("grpc://[::1]:65535/m/1", Remote("[::1]:65535", "m", "1")),
        ("grpc://a_b.c-d.example.:1/m", Remote("a_b.c-d.example.:1", "m", "")),
        ("grpc://[fe80::1%eth0]:1/m", Remote("[fe80::1%eth0]:1", "m", "")),
        (f"grpc://{'.'.join(['a' * 63] * 3)}:1/m", Remote(f"{'.'.join(['a' * 63] * 3)}:1", "m", "")),
    ],
)
def test_a_model_of_another_server_is_named_by_its_address(text: str, remote: Remote) -> None:
    policy = ShadowPolicy(reference=text)
    assert (policy.remote, policy.on, str(remote)) == (remote, True, text)


@pytest.mark.parametrize(
    "text",
    [
        "grpc://h:0/m",
        "grpcss://h:1/m",
        "GRPCS://h:1/m",
        "grpc://h:65536/m",
        "grpc://h/m",
        "grpc://:1/m",
        "grpc://h:1",
        "grpc://h:1/",
        "grpc://h:1/m/0",
        "grpc://h:1/m/x",
        "grpc://h:1/m/1/2",
        "grpc://h:1/m\n",
        "grpc://h:1/modèle",
        "grpc://h:1/m\x00",
        "grpc://h:1/\ud800",
        "http://h:1/m",
        "elsewhere",
        "",
        True,
    ],
)
def test_an_invalid_address_is_rejected(text: object) -> None:
    with pytest.raises(ValidationError):
        ShadowPolicy.model_validate({"reference": text})


@pytest.mark.parametrize(
    ("given", "on"),
    [({}, True), ({"reference": "off"}, False), ({"reference": False}, False), ({"rate": 0}, False)],
)
def test_nothing_is_measured_if_the_reference_is_off_or_false_or_the_rate_is_0(
    given: dict[str, object], on: bool
) -> None:
    assert ShadowPolicy.model_validate(given).on == on


def test_a_policy_survives_being_sent_to_another_process() -> None:
    policy = ShadowPolicy(reference="grpc://h:1/m", reference_memory_bytes=5)
    assert ShadowPolicy.model_validate(policy.model_dump(mode="json")) == policy


@pytest.mark.parametrize(
    "host",
    [
        "h\x00", "h\x1b[1m", "h%00", "h,i", "h?x", "h#x", "user@h", "h;i", "h\\i", "hôte", "h*", "'h'", "-h", "h-",
        ".h", "h..i", "", "[::1", "::1", "[::g]", "[1.2.3.4]", "[]", "[::1%]", "[::1%a/b]", "[::1%" + "z" * 16 + "]",
        "a" * 64, ".".join(["a" * 63] * 4),
    ],
)  # fmt: skip
def test_an_invalid_host_is_rejected_with_one_error_that_says_what_is_valid(host: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ShadowPolicy.model_validate({"reference": f"grpc://{host}:1/m"})
    (error,) = refused.value.errors()
    assert "give process, off or grpc://HOST:PORT/MODEL[/VERSION], over TLS grpcs://" in error["msg"]
    if not set(host) & set("[]:/"):
        assert "; HOST is a name of at most 253 letters, digits" in error["msg"]
