"""The manifests of deploy/ as kubectl and helm render them, and the checks that the cluster's API would make."""

from __future__ import annotations

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
BASE, OVERLAYS = DEPLOY / "kubernetes" / "base", DEPLOY / "kubernetes" / "overlays"
CHART = DEPLOY / "helm" / "bf16kit"
KUBERNETES = "1.37"  # whose schemas are looked into
_TOOLS = ROOT / "build" / "kubernetes"

Manifest = dict[str, Any]

needs_tools = pytest.mark.skipif(
    not all((_TOOLS / name).exists() for name in ("kubectl", "helm")),
    reason=f"no kubectl and helm in {_TOOLS.relative_to(ROOT)} (make test-deploy fetches them)",
)
needs_schemas = pytest.mark.skipif(
    find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed (make setup has it)"
)


class Refused(Exception):
    """What kubectl, helm or a schema said."""


def _run(tool: str, *arguments: str | Path) -> str:
    # helm looks for plugins and repositories where its user keeps them: the chart is to need none.
    environment = {**os.environ, "HELM_PLUGINS": str(_TOOLS), "HELM_REPOSITORY_CONFIG": os.devnull}
    command = [str(_TOOLS / tool), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    if done.returncode != 0:
        raise Refused(done.stderr + done.stdout)
    return done.stdout


@cache
def _kustomized(directory: Path) -> str:
    return _run("kubectl", "kustomize", directory)


def kustomized(directory: Path) -> list[Manifest]:
    """What `kubectl apply -k` would send."""
    return list(read(_kustomized(directory)))


@cache
def _charted(release: str, *arguments: str) -> str:
    return _run("helm", "template", release, CHART, "--namespace", "bf16kit", *arguments)


def charted(*arguments: str, release: str = "bf16kit") -> list[Manifest]:
    """What `helm install bf16kit` would send, with such flags as ``--set``."""
    return list(read(_charted(release, *arguments)))


def charted_by(file: Path, values: Any, *arguments: str) -> list[Manifest]:
    """The same with ``values`` written to ``file``: Helm reads numbers of a file otherwise than those of its flags."""
    file.write_text(json.dumps(values), "utf-8")  # which is YAML, and says what is text
    return charted("--values", str(file), *arguments)


def linted(*arguments: str) -> str:
    """What `helm lint --strict` says of the chart; :class:`Refused` when it finds something."""
    return _run("helm", "lint", "--strict", CHART, *arguments)


def read(text: str) -> Iterator[Manifest]:
    """The documents of a stream of YAML."""
    yield from (document for document in yaml.safe_load_all(text) if document)


def plain() -> list[Manifest]:
    """The manifests that are applied as they are written."""
    files = sorted((DEPLOY / "kserve").glob("*.yaml"))
    return [document for path in files for document in read(path.read_text("utf-8"))]


def named(manifest: Manifest) -> str:
    """Its kind and name, to find it by."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def one(manifests: list[Manifest], kind: str, name: str = "bf16kit") -> Manifest:
    """The one of that kind and name."""
    (found,) = [each for each in manifests if named(each) == f"{kind}/{name}"]
    return found


def check(manifest: Manifest) -> None:
    """Hold it to the schema of its kind, unknown fields refused. :class:`Refused` with what is wrong and where.

    Kinds that Kubernetes does not have are held to :mod:`crdschemas`, and what such a kind takes for containers and
    volumes to the schema of a pod.
    """
    import jsonschema  # not at the top: who has no such package still reads manifests

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
    """Each manifest that makes pods, with the specification of those."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if "template" in spec:
            yield manifest, spec["template"]["spec"]
        elif "containers" in spec:
            yield manifest, spec


def containers(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Each container, those that run first included."""
    for _, spec in pods(manifests):
        yield from (*spec.get("initContainers", ()), *spec["containers"])
