"""The status page: which models are served, how they really run, and why one is not ready. Everything is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from bf16kit.tensors import BY_NAME, TensorSpec, describe
from service.contract import Duration, Model, Registry, Slot

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .8rem .3rem 0;
vertical-align: top; border-bottom: 1px solid #ddd; } th { font-weight: 600; white-space: nowrap; width: 12rem; }
.ready { color: #06672d; } .loading { color: #8a5a00; } .unavailable { color: #a40e26; }
@media (prefers-color-scheme: dark) { body { background: #181a1b; color: #ddd; } th, td { border-color: #444; }
a { color: #8ab4f8; } .ready { color: #6fcf97; } .loading { color: #f2c94c; } .unavailable { color: #ff7b88; } }
"""


def status_page(registry: Registry) -> str:
    """The whole page, as HTML that needs nothing from elsewhere."""
    slots = registry.models()
    state = "ready" if registry.ready else "unavailable"
    words = "ready" if registry.ready else "not ready"
    body = "\n".join(_slot(slot) for slot in slots) if slots else _EMPTY
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>bf16kit: {words}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>bf16kit server: <span class="{state}">{words}</span></h1>\n{body}\n'
        '<p><a href="/metrics">metrics</a> · <a href="/livez">livez</a> · <a href="/readyz">readyz</a></p>\n'
        "</body>\n</html>\n"
    )


_EMPTY = (
    "<p>The repository is empty. Put artifacts under <code>&lt;model&gt;/&lt;version&gt;/</code>"
    " (<code>bf16-convert checkpoint</code> writes them there) and restart the server.</p>"
)


def _slot(slot: Slot) -> str:
    state, model = slot.state, slot.model
    rows = [_row("state", f'<span class="{escape(state)}">{escape(state)}</span>')]
    if state == "unavailable":
        rows.append(_row("reason", escape(slot.reason)))
    if model is not None:
        rows += _running(model)
        rows += [_row("inputs", _specs(model.inputs)), _row("outputs", _specs(model.outputs))]
    table = "\n".join(rows)
    return f"<h2>{escape(slot.name)} · version {slot.version}</h2>\n<table>\n{table}\n</table>"


def _running(model: Model) -> list[str]:
    info, seen = model.info, model.statistics.snapshot()
    how = f"{info.backend} on {info.device}, profile {info.profile}"
    numerics = f"precision {info.precision}, accumulation {info.accumulation}"
    if info.kernel:
        numerics += f", kernel {info.kernel}"
    batching = f"up to {model.max_batch_size} rows" if model.max_batch_size else "off"
    done = f"{seen.success.count} answered, {seen.fail.count} refused or failed, {seen.execution_count} batches"
    rows = [_row("runtime", escape(how)), _row("numerics", escape(numerics))]
    if info.choice:
        rows.append(_row("profile", escape(info.choice)))
    if info.note:
        rows.append(_row("note", escape(info.note)))
    return [
        *rows,
        _row("weights", _size(seen.weight_bytes)),
        _row("batching", batching),
        _row("requests", done),
        _row("mean times", f"queue {_mean_ms(seen.queue)}, compute {_mean_ms(seen.compute_infer)}"),
    ]


def _row(head: str, cell: str) -> str:
    """``cell`` is HTML already; ``head`` is ours."""
    return f'<tr><th scope="row">{head}</th><td>{cell}</td></tr>'


def _specs(specs: Iterable[TensorSpec]) -> str:
    return "<br>".join(escape(f"{s.name}: {BY_NAME[s.dtype].oip} {describe(s.shape)}") for s in specs)


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def _mean_ms(duration: Duration) -> str:
    return f"{duration.ns / duration.count / 1e6:.2f} ms" if duration.count else "–"
