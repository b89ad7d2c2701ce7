from __future__ import annotations

import pytest

from service.config.serverconfig import ServerConfig, unknown_variables


def test_a_misspelt_setting_is_reported_with_the_nearest_known_one() -> None:
    said = unknown_variables({"BF16KIT_GRPC_PROT": "9000", "PATH": "/bin", "BF16KIT_HTTP_PORT": "9001"})
    assert said == (
        "unknown environment variables are ignored: 'BF16KIT_GRPC_PROT' (BF16KIT_GRPC_PORT?);"
        " docs/operations.md names every setting"
    )


def test_an_unknown_variable_is_reported_without_its_value() -> None:
    said = unknown_variables({"BF16KIT_PASSWORD": "hunter2"})
    assert "variables are ignored: 'BF16KIT_PASSWORD';" in said
    assert "hunter2" not in said


def test_every_setting_and_every_other_known_variable_is_accepted() -> None:
    others = ("CONFIG", "KERNEL_PATH", "TOKEN", "HEALTH_CERTIFICATE", "HEALTH_KEY", "TENSORFLOW_PYTHON")
    names = [f"BF16KIT_{name}".upper() for name in (*ServerConfig.model_fields, *others)]
    assert unknown_variables(dict.fromkeys([*names, "bf16kit_grpc_port"], "x")) == ""


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
def test_variables_that_kubernetes_sets_for_a_service_are_not_reported(name: str, value: str) -> None:
    assert unknown_variables({name: value}) == ""


def test_a_plain_port_variable_is_reported() -> None:
    assert "'BF16KIT_PORT'" in unknown_variables({"BF16KIT_PORT": "9000"})


def test_many_unknown_variables_are_shortened_to_a_count() -> None:
    assert "and 3 more" in unknown_variables({f"BF16KIT_X{number}": "" for number in range(8)})
