"""A repository together with its controller: a test can make it read its directory, and load and unload models."""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from artifacts import write_mlp

from bf16kit.service.models import loading
from bf16kit.service.models.controller import Controller
from bf16kit.service.models.repository import Repository
from bf16kit.service.telemetry.metrics import Metrics


class Controlled(Repository):
    """Serves the models in the directory ``root``."""

    def __init__(self, root: Path, metrics: Metrics, **options: Any) -> None:
        super().__init__(metrics, **options)
        self.control = Controller(root, self.apply, self.apply_all, slots=self.models)

    def scan(self) -> None:
        """Read the directory, and request the models that it holds now."""
        self.control.poll(lambda: None)

    def load(self, name: str, config: str | None = None) -> Future[None]:
        return self.control.load(name, config)

    def unload(self, name: str) -> Future[None]:
        return self.control.unload(name)


class HeldLoads:
    """Stands in for ``loading.load``: records the loads in ``begun``, and holds them while ``go`` is not set."""

    def __init__(self) -> None:
        self.load: Callable[..., Any] = loading.load
        self.begun: list[str] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, path: Path, *given: Any, **more: Any) -> loading.LoadedModel:
        self.begun.append(f"{path.parent.name}/{path.name}")
        assert self.go.wait(60)
        loaded: loading.LoadedModel = self.load(path, *given, **more)
        return loaded


def write_model(root: Path, name: str, version: int = 1, *, serving: str, **made: Any) -> Path:
    """Write an artifact in place of any existing one, and its ``serving.yaml``. Return its directory."""
    target = root / name / str(version)
    shutil.rmtree(target, ignore_errors=True)
    write_mlp(target, **made)
    (root / name / "serving.yaml").write_text(serving, "utf-8")
    return target
