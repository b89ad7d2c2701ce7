"""The server's settings in the values of the Helm chart: the chart accepts and rejects what the server does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import CHART, charted_by, needs_schemas, needs_tools, one
from pydantic import ValidationError

from bf16kit.service.config.serverconfig import ServerConfig

pytestmark = [pytest.mark.manifests, needs_tools]
SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))["config"]
TLS = {"tls_certificate": "/etc/bf16kit-secret/tls.crt", "tls_key": "/etc/bf16kit-secret/tls.key"}


def settings_schema() -> Any:
    return {"$defs": SCHEMA["$defs"], **SCHEMA["properties"]["config"]}


def takes(config: Any) -> bool:
    """Return whether the chart accepts the settings."""
    import jsonschema

    return bool(jsonschema.Draft202012Validator(settings_schema()).is_valid({**DEFAULTS, **config}))


def server_takes(config: Any) -> bool:
    try:
        ServerConfig(**{**DEFAULTS, **config})
    except ValidationError:
        return False
    return True


def tried() -> Iterator[tuple[str, Any]]:
    """Yield, for each setting, its default, the bounds of the server's schema, values around them, and wrong ones."""
    for key, field in ServerConfig.model_json_schema()["properties"].items():
        told = next((each for each in field.get("anyOf", ()) if each.get("type") != "null"), field)
        bounds = [told[name] for name in ("minimum", "maximum", "exclusiveMinimum") if name in told]
        step = 1 if told.get("type") == "integer" else 0.5
        values = [value for bound in bounds for value in (bound - step, bound, bound + step)]
        values += told.get("enum", ())
        values += ["", "nonsense", "a b", -1, True, False, ["nonsense"], []]
        for value in values:
            yield key, value
        if (default := field.get("default")) is not None:
            yield key, default


@needs_schemas
def test_the_chart_has_every_setting_and_rejects_what_the_server_rejects() -> None:
    """If the server rejects a setting, its pod restarts again and again, and only its log gives the reason."""
    assert set(settings_schema()["properties"]) == set(ServerConfig.model_fields)
    lenient = [(key, value) for key, value in tried() if takes({key: value}) and not server_takes({key: value})]
    assert lenient == []


# The chart is stricter than the server for these, on purpose: some values could not work in a pod.
NARROWER = {
    *("repository", "host", "grpc_port", "http_port", "load_model"),
    *("tls_certificate", "tls_key", "tls_client_ca", "token_file"),
}


@needs_schemas
def test_the_chart_accepts_what_the_server_accepts() -> None:
    for key, value in tried():
        if key not in NARROWER and type(value) is not bool and server_takes({key: value}):
            assert takes({key: value}), (key, value)
    assert takes({"evidence": False, "shared_memory": True})


@needs_schemas
@pytest.mark.parametrize(
    "config",
    [
        TLS,
        {"tls_certificate": "/a"},
        {"tls_key": "/a"},
        {"tls_client_ca": "/a"},
        {**TLS, "tls_client_ca": "/a"},
        {"evidence": True},
        {"evidence": True, "token_file": "/a"},
        {"load_model": ["m"]},
        {"load_model": ["m"], "model_control": "explicit"},
        {"load_model": ["m"], "model_control": "poll"},
    ],
    ids=str,
)
def test_chart_and_server_agree_on_combinations_of_settings(config: dict[str, Any]) -> None:
    assert takes(config) is server_takes(config)


def test_large_numbers_in_a_values_file_stay_integers(tmp_path: Path) -> None:
    """Helm reads numbers of a file as floats; printed without conversion, one would be 5.36870912e+08."""
    sizes = {"max_message_bytes": 536_870_912, "max_in_flight": 5_000_000, "trace_rate": 1_000_000}
    manifests = charted_by(tmp_path / "values.yaml", {"config": sizes})
    written = yaml.safe_load(one(manifests, "ConfigMap")["data"]["server.yaml"])
    assert {key: written[key] for key in sizes} == sizes
    assert all(type(written[key]) is int for key in sizes)
    assert ServerConfig(**written).max_message_bytes == 536_870_912
