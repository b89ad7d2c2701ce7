from __future__ import annotations

import pytest

from service.process.config import ServerConfig
from service.process.environment import unread


def test_a_misspelt_setting_is_named_with_the_one_that_is_meant() -> None:
    said = unread({"BF16KIT_GRPC_PROT": "9000", "PATH": "/bin", "BF16KIT_HTTP_PORT": "9001"})
    assert said == (
        "unknown environment variables are ignored: 'BF16KIT_GRPC_PROT' (BF16KIT_GRPC_PORT?);"
        " docs/operations.md names every setting"
    )


def test_what_resembles_nothing_is_named_alone_and_no_value_is_told() -> None:
    said = unread({"BF16KIT_PASSWORD": "hunter2"})
    assert "variables are ignored: 'BF16KIT_PASSWORD';" in said
    assert "hunter2" not in said


def test_every_setting_and_what_else_has_the_prefix_is_read() -> None:
    others = ("CONFIG", "KERNEL_PATH", "TOKEN", "HEALTH_CERTIFICATE", "HEALTH_KEY", "TENSORFLOW_PYTHON")
    names = [f"BF16KIT_{name}".upper() for name in (*ServerConfig.model_fields, *others)]
    assert unread(dict.fromkeys([*names, "bf16kit_grpc_port"], "x")) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BF16KIT_SERVICE_HOST", "10.0.0.1"),
        ("BF16KIT_SERVICE_PORT", "8001"),
        ("BF16KIT_METRICS_SERVICE_PORT_HTTP", "8002"),
        ("BF16KIT_PORT", "tcp://10.0.0.1:8001"),
        ("BF16KIT_PORT_8001_TCP", "tcp://10.0.0.1:8001"),
        ("BF16KIT_PORT_8001_TCP_PROTO", "tcp"),
        ("BF16KIT_METRICS_PORT_8002_TCP_ADDR", "10.0.0.2"),
    ],
)
def test_what_kubernetes_writes_for_a_service_of_that_name_is_nobodys_mistake(name: str, value: str) -> None:
    assert unread({name: value}) == ""


def test_a_port_that_somebody_guessed_is_no_service() -> None:
    assert "'BF16KIT_PORT'" in unread({"BF16KIT_PORT": "9000"})


def test_many_are_counted() -> None:
    assert "and 3 more" in unread({f"BF16KIT_X{number}": "" for number in range(8)})
