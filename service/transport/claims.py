"""A model that is idle and quick, held for one request before that has been parsed."""

from __future__ import annotations

from contextlib import AbstractContextManager

from service.contract import Model, Registry
from service.request import Claim


class Claimed:
    """A ``claim`` of a model, and the lease that keeps it: whatever takes the model's place meanwhile, the request is
    answered by this one. Asked again, the registry could give one that is at work, and the request would wait for it.

    As a context it is the model; what it holds is given back by :meth:`give_back` alone.
    """

    __slots__ = ("_lease", "claim", "model")

    def __init__(self, model: Model, claim: Claim, lease: AbstractContextManager[Model]) -> None:
        self.model = model
        self.claim = claim
        self._lease = lease

    def __enter__(self) -> Model:
        return self.model

    def __exit__(self, *_: object) -> None: ...

    def give_back(self) -> None:
        """Once, when the call is over."""
        self.claim.give_back()
        self._lease.__exit__(None, None, None)


def claim_model(registry: Registry, name: str, version: str, nbytes: int) -> Claimed | None:
    """For a request whose message has ``nbytes``; None where its model is at work, or not known to be quick with that
    many. Raises what ``registry`` refuses."""
    model = registry.get(name, version)
    claim = model.claim(nbytes)
    if claim is None:
        return None
    try:
        lease = registry.acquire(name, version)
        if lease.__enter__() is model:
            return Claimed(model, claim, lease)
        lease.__exit__(None, None, None)
    except BaseException:
        claim.give_back()
        raise
    claim.give_back()  # it was replaced between the two
    return None
