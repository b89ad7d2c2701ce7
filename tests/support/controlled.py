"""A repository together with its controller: a test can make it read its directory, and load and unload models."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

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
