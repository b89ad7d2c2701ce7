"""Wait for something that another thread or process does: for a condition, never for a fixed time.

Only what must *not* happen takes a fixed time: see :func:`stays`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def until(
    condition: Callable[[], object], seconds: float = 60.0, what: str | Callable[[], str] = "the condition"
) -> None:
    """Return as soon as ``condition()`` is true. Raise AssertionError after ``seconds``; only failures take so long."""
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        if waited > seconds:
            text = what if isinstance(what, str) else what()  # a function tells the state at the end
            raise AssertionError(f"{text} did not come true within {seconds:g} s")
        # The longer it takes, the less often it is asked: a condition may ask the server that is to get the processor.
        time.sleep(min(max(0.002, waited / 50), 0.02))


def stays(condition: Callable[[], object], seconds: float, what: str = "the condition") -> None:
    """Check for ``seconds`` that ``condition()`` stays true. Raise AssertionError as soon as it is not."""
    begun = time.monotonic()
    while (passed := time.monotonic() - begun) < seconds:
        assert condition(), f"{what} was true for {passed:.2f} s of {seconds:g} s"
        time.sleep(0.01)


@contextmanager
def repeating(*tasks: Callable[[], object], pause: float = 0.0) -> Iterator[None]:
    """Call each task again and again on a thread of its own while the block runs, with pauses of so many seconds.

    A task that fails is not repeated; the first error is raised at the end of the block.
    """
    over, errors = threading.Event(), list[BaseException]()

    def repeat(task: Callable[[], object]) -> None:
        try:
            while not over.wait(pause):
                task()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def slowdown() -> float:
    """Return the time that 50 ms of processor time take now ÷ 50 ms: 1 on an idle machine, more on a busy one."""
    begun, end = time.monotonic(), time.process_time() + 0.05
    while time.process_time() < end:
        pass
    return max(1.0, (time.monotonic() - begun) / 0.05)
