"""Requests whose results are futures, and models that stay loaded for the length of a block."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from bf16kit.service.request import Done, Reply, Request

M = TypeVar("M")


@contextmanager
def leased(acquire: Callable[[str, str], M], name: str, version: str = "") -> Iterator[M]:
    """Return a context in which the model that ``acquire`` returns stays loaded."""
    model: Any = acquire(name, version)
    try:
        yield model
    finally:
        model.release()


def begun(begin: Callable[[Request, Done], None], request: Request) -> Future[Reply]:
    """Begin a request, and return the future of its reply or of its error."""
    future: Future[Reply] = Future()

    def done(result: Reply | Exception) -> None:
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    try:
        begin(request, done)
    except Exception as error:  # noqa: BLE001 -- the test looks at it
        future.set_exception(error)
    return future
