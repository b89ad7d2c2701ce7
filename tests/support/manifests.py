"""The manifests of deploy/ as helm renders them, and the checks that the cluster's API would do."""

import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from crdschemas import SCHEMAS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "bf16kit"
EVERYTHING = ("--set", "monitoring.enabled=true,autoscaling.enabled=true")
#: The flags for each way to use the chart.
WAYS = {
    "chart": (),
    "chart, everything": EVERYTHING,
    "gpu": ("--values", str(DEPLOY / "helm" / "gpu.yaml")),
    "demo": ("--values", str(DEPLOY / "helm" / "demo.yaml")),
}
KUBERNETES = "1.37"  # the version whose schemas are used
_TOOLS = ROOT / "build" / "environments" / "helm" / "bin"

Manifest = dict[str, Any]

needs_tools = pytest.mark.skipif(
    not (_TOOLS / "helm").exists(), reason=f"no helm in {_TOOLS.relative_to(ROOT)} (make test-deploy fetches it)"
)
needs_schemas = pytest.mark.skipif(
    find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed (make setup has it)"
)


class Refused(Exception):
    """An error of helm or of a schema."""


def _helm(*arguments: str | Path) -> str:
    # Hide the user's plugins and repositories from helm: the chart must not need any.
    environment = {**os.environ, "HELM_PLUGINS": str(_TOOLS), "HELM_REPOSITORY_CONFIG": os.devnull}
    command = [str(_TOOLS / "helm"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    if done.returncode != 0:
        raise Refused(done.stderr + done.stdout)
    return done.stdout


@cache
def _charted(release: str, *arguments: str) -> str:
    return _helm("template", release, CHART, "--namespace", "bf16kit", *arguments)


def charted(*arguments: str, release: str = "bf16kit") -> list[Manifest]:
    """Return what `helm install bf16kit` would send; ``arguments`` are flags such as ``--set``."""
    return list(read(_charted(release, *arguments)))


def charted_by(file: Path, values: Any, *arguments: str) -> list[Manifest]:
    """Return the same for ``values`` in a ``file``: Helm parses numbers in a file differently from those in flags."""
    file.write_text(json.dumps(values), "utf-8")  # JSON is valid YAML and quotes all strings
    return charted("--values", str(file), *arguments)


def linted(*arguments: str) -> str:
    """Return the output of `helm lint --strict` for the chart. Raises :class:`Refused` if it reports a problem."""
    return _helm("lint", "--strict", CHART, *arguments)


def read(text: str) -> Iterator[Manifest]:
    """Yield the documents of a YAML stream, without empty ones."""
    yield from (document for document in yaml.safe_load_all(text) if document)


def plain() -> list[Manifest]:
    """Return the manifests that are applied without rendering: those for KServe."""
    files = sorted((DEPLOY / "kserve").glob("*.yaml"))
    return [document for path in files for document in read(path.read_text("utf-8"))]


def named(manifest: Manifest) -> str:
    """Return kind/name of a manifest."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def one(manifests: list[Manifest], kind: str, name: str = "bf16kit") -> Manifest:
    """Return the only manifest of that kind and name."""
    (found,) = [each for each in manifests if named(each) == f"{kind}/{name}"]
    return found


def check(manifest: Manifest) -> None:
    """Validate a manifest against the schema of its kind; unknown fields are errors.

    Raises :class:`Refused` with the error and its place. Kinds that Kubernetes does not have are validated against
    :mod:`crdschemas`, and their containers and volumes against the schema of a pod.
    """
    import jsonschema  # imported here, because tests that only read manifests work without this package

    schema = SCHEMAS.get((manifest["apiVersion"], manifest["kind"]))
    if schema is None:
        _of_kubernetes(manifest)
        return
    found = sorted(jsonschema.Draft202012Validator(schema).iter_errors(manifest), key=lambda error: error.json_path)
    if found:
        raise Refused("; ".join(f"{error.json_path}: {error.message[:200]}" for error in found))
    if "containers" in (spec := manifest["spec"]):
        kept = {key: spec[key] for key in ("containers", "volumes") if key in spec}
        _of_kubernetes({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": kept})


def _of_kubernetes(manifest: Manifest) -> None:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Refused(f"{named(manifest)}: {'.'.join(map(str, error.path))}: {error.message[:300]}") from None
    except kubernetes_validate.SchemaNotFoundError as error:
        raise Refused(f"{named(manifest)}: Kubernetes {KUBERNETES} has no such kind: {error}") from None


def pods(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield each manifest that creates pods, with its pod specification."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if "template" in spec:
            yield manifest, spec["template"]["spec"]
        elif "containers" in spec:
            yield manifest, spec


def containers(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Yield each container, init containers included."""
    for _, spec in pods(manifests):
        yield from (*spec.get("initContainers", ()), *spec["containers"])
