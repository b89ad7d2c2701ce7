"""The repository index and the statistics of a server with one process."""

from __future__ import annotations

from collections.abc import Sequence

from service.models.controller import Controller
from service.models.repository import Repository
from service.operations import IndexEntry, RegistryModels


class RepositoryListing(RegistryModels):
    """The index also has models in the repository that are not served."""

    def __init__(self, repository: Repository, controller: Controller) -> None:
        super().__init__(repository)
        self._repository = repository
        self._controller = controller

    def index(self) -> Sequence[IndexEntry]:
        served = super().index()
        known = {(line.name, line.version) for line in served}
        unloading = [IndexEntry(slot.name, str(slot.version), "UNLOADING") for slot in self._repository.unloading()]
        return self._controller.index(
            [*served, *(line for line in unloading if (line.name, line.version) not in known)]
        )
