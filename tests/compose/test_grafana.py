"""Grafana, if its image is on this machine: no package contains it, and no one has opened it here so far."""

import json
from collections.abc import Iterator

import pytest
import yaml
from composing import ROOT, Stack, get, have_image
from waiting import until

pytestmark = pytest.mark.compose


@pytest.fixture(scope="module")
def grafana(stack: Stack) -> Iterator[str]:
    """Yield Grafana's address."""
    image = stack.compose("config", "--images", "grafana").splitlines()
    name = next(name for name in image if "grafana" in name)
    if not have_image(name):
        pytest.skip(f"the image {name} is not on this machine (docker pull {name})")
    stack.up("grafana")
    address = f"http://127.0.0.1:{stack.environment['GRAFANA_PORT']}"
    until(lambda: get(f"{address}/api/health")[0] == 200, 120, "Grafana")
    yield address
    stack.compose("stop", "grafana")


def test_anonymous_users_see_the_dashboard_and_the_stacks_prometheus(grafana: str) -> None:
    status, text = get(f"{grafana}/api/dashboards/uid/bf16kit")
    assert status == 200
    assert json.loads(text)["meta"]["provisioned"]
    uid = yaml.safe_load(
        (ROOT / "deploy" / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text("utf-8")
    )["datasources"][0]["uid"]
    status, text = get(f"{grafana}/api/datasources/proxy/uid/{uid}/api/v1/query?query=up")
    assert status == 200
    assert json.loads(text)["data"]["result"]


def test_no_user_can_log_in_or_read_the_admin_settings(grafana: str) -> None:
    """The default password does not work either."""
    assert get(f"{grafana.replace('//', '//admin:admin@')}/api/org")[0] in (0, 401)
    assert get(f"{grafana}/api/admin/settings")[0] in (401, 403)
