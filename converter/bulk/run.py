"""Converts a whole worklist, several at a time. Ctrl-C keeps what is done; a later run converts the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from bf16kit.messages.text import table
from converter.bulk.executor import Executor
from converter.bulk.item import Outcome, convert
from converter.bulk.worklist import Item, Worklist

INTERRUPTED = 130
_SHOWN = 10  # lines on what was passed over

Notify = Callable[[str], None]


def run(
    worklist: Worklist, repository: Path, executor: Executor, *, jobs: int, force: bool, notify: Notify
) -> tuple[list[Outcome], bool]:
    """Convert every item by ``executor``, ``jobs`` at a time, and report each result as it comes.

    Returns the outcomes in the worklist's order, and whether Ctrl-C interrupted the run.
    """
    outcomes = dict[str, Outcome]()
    total = len(worklist.items)

    def convert_one(item: Item) -> Outcome:
        if executor.stopped:
            return Outcome(item.model, item.source.name, "interrupted", INTERRUPTED)
        return convert(item, repository, force=force, start=executor.start)

    interrupted = False
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(convert_one, item) for item in worklist.items]
        while len(outcomes) < total:
            try:
                for future in as_completed(futures):
                    outcome = future.result()
                    if outcome.model not in outcomes:
                        outcomes[outcome.model] = outcome
                        notify(f"[{len(outcomes)}/{total}] {outcome_line(outcome)}")
            except KeyboardInterrupt:
                interrupted = True
                executor.stop()
    return [outcomes[item.model] for item in worklist.items], interrupted


def outcome_line(outcome: Outcome) -> str:
    """Describe one result in a line."""
    version = "" if outcome.version is None else f" version {outcome.version}"
    seconds = f", {outcome.seconds:.0f} s" if outcome.seconds >= 1 else ""
    detail = outcome.detail.splitlines()[0] if outcome.detail else ""
    return f"{outcome.model}{version}: {outcome.status}{seconds}{f': {detail}' if detail else ''}"


def summary(outcomes: Sequence[Outcome], worklist: Worklist) -> str:
    """Return a table of all results, and what was passed over."""
    columns = ("model", "version", "source", "result", "drift ÷ budget, or error", "seconds")
    rows = [
        (
            each.model,
            each.version,
            each.source,
            each.status,
            each.detail.splitlines()[0] if each.detail else None,
            each.seconds,
        )
        for each in outcomes
    ]
    lines = [table(_title(outcomes), columns, rows)]
    more = len(worklist.skipped) - _SHOWN
    lines += [f"skipped: {each}" for each in worklist.skipped[:_SHOWN]]
    lines += [f"skipped: {more} more"] if more > 0 else []
    return "\n".join(lines)


def _title(outcomes: Sequence[Outcome]) -> str:
    done = sum(outcome.code == 0 for outcome in outcomes)
    return f"{done} of {len(outcomes)} checkpoints converted"


def worst_exit_code(outcomes: Sequence[Outcome], *, interrupted: bool) -> int:
    """Return the exit code of the whole run: the largest of all."""
    return INTERRUPTED if interrupted else max((outcome.code for outcome in outcomes), default=0)
