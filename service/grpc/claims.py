"""A claim on an idle and quick model for one request, made before the request is parsed."""

from __future__ import annotations

from contextlib import AbstractContextManager

from service.contract import Model, Registry
from service.request import Claim


class ClaimedModel:
    """A ``claim`` of a model, and the lease that keeps it: this model answers even if it is replaced meanwhile.

    A second look-up in the registry could return a busy model, and the request would wait for it. As a context manager
    it yields the model. Only :meth:`release` releases what it holds.
    """

    __slots__ = ("_lease", "claim", "model")

    def __init__(self, model: Model, claim: Claim, lease: AbstractContextManager[Model]) -> None:
        self.model = model
        self.claim = claim
        self._lease = lease

    def __enter__(self) -> Model:
        return self.model

    def __exit__(self, *_: object) -> None: ...

    def release(self) -> None:
        """Release the claim and the lease, once, when the call is over."""
        self.claim.release()
        self._lease.__exit__(None, None, None)


def claim_model(registry: Registry, name: str, version: str, nbytes: int) -> ClaimedModel | None:
    """Claim the model for a request whose message has ``nbytes``.

    Returns None if the model is busy, or not known to be quick at that size. Raises the registry's errors.
    """
    model = registry.get(name, version)
    claim = model.claim(nbytes)
    if claim is None:
        return None
    try:
        lease = registry.acquire(name, version)
        if lease.__enter__() is model:
            return ClaimedModel(model, claim, lease)
        lease.__exit__(None, None, None)
    except BaseException:
        claim.release()
        raise
    claim.release()  # the model was replaced between get() and acquire()
    return None
