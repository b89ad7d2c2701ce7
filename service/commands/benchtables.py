"""The measurements of `bf16-serve bench`, in the order of its three tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import click

from bf16kit.messages.errors import ConfigError, NotFound, UsageError
from bf16kit.messages.wording import quoted
from bf16kit.runtime import Runtime, available_cpus
from bf16kit.runtime import loading as runtimes
from bf16kit.runtime.ort import kernel
from service.commands.benchresult import BenchResult, Options
from service.commands.inputs import inputs_of
from service.commands.interleaved import ROUNDS, Cell, measure_in_turns, sequential_calls
from service.commands.layouts import Layout, layouts, smallest_worthwhile
from service.commands.parallel import concurrent_calls
from service.contract import Array
from service.models import loading
from service.models.directory import desired_model_of, directories_in
from service.models.generation import Generation
from service.models.loading import LoadedModel
from service.models.plan import Plan
from service.models.serving import DEFAULT_MAX_BATCH_SIZE, Serving
from service.request import Request
from service.telemetry.metrics import Metrics

CLIENTS = (1, 2, 4, 8, 16, 32, 64)
_SHARES = (0.2, 0.3, 0.5)  # of the whole time, per table
_CLOSE_SECONDS = 30.0
_Feeds = Mapping[int, Mapping[str, Array]]


def measure(options: Options) -> BenchResult:
    """Load the model as the server does, and measure it. Raises NotFound, or the error that prevents loading it."""
    plan = _plan(options)
    config = options.config
    loaded = loading.load(plan.path, plan.serving, device=config.device, threads=config.threads)
    with ExitStack() as stack:
        stack.callback(loaded.close)
        opened = loaded.opened
        inputs = inputs_of(opened, options.samples, options.shapes)
        measured = BenchResult(options, plan, loaded, inputs)

        def load(profile: str, threads: int | None) -> Runtime:
            runtime = runtimes.load(opened.artifact, profile, device=loaded.info.device, threads=threads)
            stack.callback(runtime.close)
            return runtime

        sizes = _rows(options, loaded)
        feeds = {rows: inputs.rows(rows) for rows in sizes}
        _measure_alone(measured, load, feeds)
        wanted = layouts(loaded.info.device)
        measured.current = _current_settings(measured)
        needed = {*wanted, *((measured.current[0],) if measured.current is not None else ())}
        given = {each: load(loaded.info.profile, each.threads or None) for each in needed}
        _measure_bare(measured, {layout: given[layout] for layout in wanted}, feeds)
        _measure_served(measured, given, stack)
    return measured


# --- the three tables -------------------------------------------------------------------------------------------------


def _measure_alone(measured: BenchResult, load: Callable[[str, int | None], Runtime], feeds: _Feeds) -> None:
    """Measure one run at a time, on each profile that may serve, with the server's number of threads."""
    opened, serving, config = measured.loaded.opened, measured.plan.serving, measured.options.config
    threads = loading.threads_of_a_run(serving.instances, config.threads)
    names, _ = runtimes.choose_profiles(opened.artifact, serving.profile, config.device)
    for number, name in enumerate(names):
        native = kernel.multiplies_bf16()
        reason = loading.skip_reason(opened.artifact.manifest, name, opened.budget, native=native) if number else ""
        if reason:
            measured.skipped.append(f"profile {name} is skipped: {reason}")
            continue
        runtime = measured.loaded.runtime if name == measured.loaded.info.profile else load(name, threads)
        for rows, fed in feeds.items():
            measured.alone[name, rows] = Cell(sequential_calls(_run_call(runtime, fed), rows))
    _measure_in_turns(measured.alone.values(), measured.options, 0, "the runtime alone")


def _measure_bare(measured: BenchResult, given: Mapping[Layout, Runtime], feeds: _Feeds) -> None:
    """Measure each layout with as many runs at once as it has instances."""
    for layout, runtime in given.items():
        for rows, fed in feeds.items():
            measured.bare[layout, rows] = Cell(concurrent_calls(_run_call(runtime, fed), layout.instances, rows))
    _measure_in_turns(measured.bare.values(), measured.options, 1, "layouts, the runtime alone")


def _measure_served(measured: BenchResult, given: Mapping[Layout, Runtime], stack: ExitStack) -> None:
    """Measure clients through the batcher, each layout with its smallest worthwhile batch size.

    That is the smallest batch with which the bare runtime is within 3 % of its best rate and, if there is a target,
    within the target.
    """
    rows = measured.options.request_rows
    request = measured.inputs.rows(rows)
    settings = {(layout, _batch(measured, layout)) for layout, _ in measured.bare}
    if (
        measured.current is not None and not 0 < measured.current[1] < rows
    ):  # smaller batches would reject these requests
        settings.add(measured.current)
    for layout, max_rows in sorted(settings):
        model = _generation(measured, given[layout], layout, max_rows)
        stack.callback(partial(_close, model))
        for clients in CLIENTS:
            measured.served[layout, max_rows, clients] = Cell(
                concurrent_calls(_infer_call(model, request, rows), clients, rows)
            )
    _measure_in_turns(measured.served.values(), measured.options, 2, "clients, through the batcher")


def _measure_in_turns(cells: Collection[Cell], options: Options, table: int, label: str) -> None:
    for cell in cells:
        cell.run(0.0)  # the first turn of each is slower, and not counted
    with click.progressbar(length=len(cells) * ROUNDS, label=label, file=sys.stderr) as bar:
        measure_in_turns(list(cells), options.seconds * _SHARES[table], lambda: bar.update(1))


def _run_call(runtime: Runtime, feeds: Mapping[str, Array]) -> Callable[[], object]:
    return lambda: runtime.run(feeds)


def _close(model: Generation) -> None:
    model.close(time.monotonic() + _CLOSE_SECONDS)


def _infer_call(model: Generation, feeds: Mapping[str, Array], rows: int) -> Callable[[], object]:
    return lambda: model.infer(Request(feeds=dict(feeds), rows=rows))


# --- what is measured -------------------------------------------------------------------------------------------------


def _plan(options: Options) -> Plan:
    directories = {directory.name: directory for directory in directories_in(options.config.repository)}
    if options.model not in directories:
        raise NotFound(
            f"the repository has no model {quoted(options.model)}; it has {', '.join(directories) or 'none'}"
        )
    directory = directories[options.model]
    plan = desired_model_of(directory).plans[-1]
    if plan.broken:
        raise ConfigError(plan.broken)
    if options.version is None or options.version == plan.version:
        return plan
    if not (directory / str(options.version)).is_dir():
        raise NotFound(f"model {options.model!r} has no version {options.version}")
    return Plan(options.version, directory / str(options.version), plan.serving)


def _rows(options: Options, loaded: LoadedModel) -> tuple[int, ...]:
    if loaded.opened.batch_axis is None:
        if options.rows or options.request_rows > 1:
            raise UsageError("this model has no batch axis; leave --rows and --request-rows out")
        return (1,)
    if options.rows:
        return options.rows
    most = max(DEFAULT_MAX_BATCH_SIZE, loaded.opened.max_batch_size, options.request_rows)
    return tuple(rows for power in range(most.bit_length()) if (rows := 1 << power) >= options.request_rows)


def _current_settings(measured: BenchResult) -> tuple[Layout, int] | None:
    """Return the layout and batch size of the server's current settings."""
    serving, config = measured.plan.serving, measured.options.config
    on_cpu = measured.loaded.info.device == "cpu"
    threads = (loading.threads_of_a_run(serving.instances, config.threads) or available_cpus()) if on_cpu else 0
    return Layout(serving.instances, threads), measured.loaded.opened.max_batch_size


def _batch(measured: BenchResult, layout: Layout) -> int:
    if measured.loaded.opened.batch_axis is None:
        return 0
    cells = {rows: cell for (each, rows), cell in measured.bare.items() if each == layout}
    target = measured.options.target
    within = {rows: cell for rows, cell in cells.items() if target is None or cell.percentile(0.99) <= target}
    least = min(cells)
    best = smallest_worthwhile({rows: cell.rate for rows, cell in (within or {least: cells[least]}).items()})
    return max(best, measured.options.request_rows)


def _generation(measured: BenchResult, runtime: Runtime, layout: Layout, max_rows: int) -> Generation:
    """Return the model as it would be served with these settings, with a queue that has room for all clients."""
    changes: dict[str, object] = {
        "instances": layout.instances,
        "max_batch_size": max_rows,
        "max_queue_size": max(CLIENTS),
        "max_queue_ms": 3_600_000.0,
        "shadow": measured.plan.serving.shadow.model_copy(update={"rate": 0.0}),
    }
    serving: Serving = measured.plan.serving.model_copy(update=changes)
    opened = replace(measured.loaded.opened, max_batch_size=max_rows)
    loaded = replace(measured.loaded, opened=opened, runtime=runtime)
    name, version = measured.options.model, measured.plan.version
    return Generation(name, version, loaded, serving, partial(Metrics().add, name, version))
