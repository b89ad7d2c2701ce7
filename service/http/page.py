"""The status page: what an operator asks about a server, in that order.

It loads nothing from elsewhere and runs no script. All text from elsewhere is escaped.
"""

from __future__ import annotations

from html import escape
from typing import Literal

from bf16kit.messages.wording import brief
from service.http import formatting
from service.http.driftsection import problems
from service.http.markup import code, details, figure, table
from service.http.modelsection import latency, model_section
from service.http.style import STYLE
from service.http.views import SPAN_SECONDS, WINDOW_SECONDS, ModelView, ServerView

Kind = Literal["good", "wait", "bad"]
_COLOURS: dict[Kind, str] = {"good": "1e8e3e", "wait": "b06000", "bad": "b3261e"}
REFRESH_SECONDS = 10
MOST_SECTIONS = 100
_MOST_REASONS = 20
_LONGEST_REASON = 300  # characters of a reason in the list of models

_EMPTY = (
    "<section>\n<h2>No models</h2>\n<p>Nothing is served. Put artifacts under"
    " <code>&lt;model&gt;/&lt;version&gt;/</code> (<code>bf16-convert checkpoint</code> writes them there) and restart"
    " the server; with <code>--model-control poll</code> the server finds them by itself, and with"
    " <code>explicit</code> clients load them.</p>\n</section>"
)
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Ccircle cx='8' cy='8' r='7' fill='%23{colour}'/%3E%3C/svg%3E"
)


def status_page(server: ServerView, *, refreshing: bool = False) -> str:
    """Return the whole page.

    A ``refreshing`` page reloads every :data:`REFRESH_SECONDS`. It is only for readers who ask for it: a reload makes a
    screen reader lose its place.
    """
    detailed = _detailed(server.models)
    anchors = {id(model): f"m{at}" for at, model in enumerate(detailed)}
    sections = [model_section(model, anchors[id(model)], server.at_seconds) for model in detailed]
    left = len(server.models) - len(detailed)
    if left:
        sections.append(f"<p>{left:,} more models are in the table above and in /status.json.</p>")
    overview = _models(server, anchors) if len(server.models) > 1 else ""
    body = [_verdict(server, anchors), _figures(server), overview, *(sections or [_EMPTY]), _early_rejections(server)]
    kind = _kind(server)
    state = "ready" if server.ready else "loading" if kind == "wait" else "not ready"
    return "\n".join(
        [
            _head(state, kind, refreshing),
            "<body>",
            '<a class="skip" href="#main">Skip to content</a>',
            _header(server, refreshing),
            '<main id="main" tabindex="-1">',
            *filter(None, body),
            "</main>",
            _footer(server),
            "</body>",
            "</html>\n",
        ]
    )


def _detailed(models: tuple[ModelView, ...]) -> list[ModelView]:
    """Return the models with a section of their own: all, or the :data:`MOST_SECTIONS` that need attention most."""
    if len(models) <= MOST_SECTIONS:
        return list(models)

    def priority(model: ModelView) -> tuple[bool, bool, float, int]:
        answered = 0 if model.recent is None else model.recent.counts.answered
        return model.state == "ready", not problems(model), -(model.drift_ratio or 0.0), -answered

    chosen = {id(model) for model in sorted(models, key=priority)[:MOST_SECTIONS]}
    return [model for model in models if id(model) in chosen]


def _head(state: str, kind: Kind, refreshing: bool) -> str:
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">\n' if refreshing else ""
    icon = _ICON.format(colour=_COLOURS[kind])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'{refresh}<meta name="color-scheme" content="light dark">\n<link rel="icon" href="{icon}">\n'
        f"<title>bf16-serve: {state}</title>\n<style>{STYLE}</style>\n</head>"
    )


def _header(server: ServerView, refreshing: bool) -> str:
    workers = "" if server.workers == 1 else f", {server.workers} workers"
    again = (
        '<li><a href="/">Stop refreshing</a></li>'
        if refreshing
        else f'<li><a href="/">Refresh</a></li>\n<li><a href="/watch">Refresh every {REFRESH_SECONDS} s</a></li>'
    )
    return (
        "<header>\n<div>\n<h1>bf16-serve</h1>\n"
        f'<p class="muted">Version {escape(server.version)}, gRPC on port {server.grpc_port}{workers}, up for'
        f" {formatting.duration(server.uptime_seconds)}, seen at {_time(server.at)}</p>\n</div>\n"
        f'<nav aria-label="Pages">\n<ul class="links">\n{again}\n<li><a href="/metrics">Metrics</a></li>\n'
        '<li><a href="/status.json">JSON</a></li>\n</ul>\n</nav>\n</header>'
    )


def _time(at: str) -> str:
    return f'<time datetime="{escape(at)}">{escape(at.partition("T")[2][:8])} UTC</time>'


# --- health -----------------------------------------------------------------------------------------------------------


def _verdict(server: ServerView, anchors: dict[int, str]) -> str:
    not_ready = server.not_ready
    found = {id(model): problems(model) for model in server.models}
    failing = [model for model in server.models if found[id(model)]]
    kind = _kind(server)
    mark = {"good": _YES, "wait": _WAIT, "bad": _NO}[kind]
    items = [_item(model, anchors, _state(model)) for model in not_ready]
    items += [_item(model, anchors, "; ".join(found[id(model)])) for model in failing]
    left = [f"<li>and {len(items) - _MOST_REASONS} more</li>"] if len(items) > _MOST_REASONS else []
    listed = "\n".join(["<ul>", *items[:_MOST_REASONS], *left, "</ul>\n"]) if items else ""
    return (
        f'<section class="verdict{"" if kind == "good" else f" {kind}"}" aria-labelledby="verdict">\n'
        f'<h2 id="verdict">{mark} {_headline(server, failing)}</h2>\n{listed}</section>'
    )


def _kind(server: ServerView) -> Kind:
    """Return what the page's colour says: that all is well, that something loads, or that somebody should look."""
    if any(model.state == "unavailable" or problems(model) for model in server.models):
        return "bad"
    if server.not_ready:
        return "wait"
    return "good" if server.ready else "bad"


def _headline(server: ServerView, failing: list[ModelView]) -> str:
    models, waiting = formatting.plural(len(server.models), "model"), len(server.not_ready)
    if server.ready:
        over = sum(model.over_budget for model in failing)
        what = (
            f"{formatting.plural(over, 'model')} over the drift budget" if over else f"{len(failing):,} with problems"
        )
        ready = len(server.models) - waiting
        counted = f"{ready:,} of {models}" if waiting else models
        return f"Ready: {counted} {'answers' if ready == 1 else 'answer'}{f', and {what}' if failing else ''}"
    if not server.models:
        return "Not ready: there are no models"
    if not waiting:
        return "Not ready: every model is ready, but the server is starting or stopping"
    if _kind(server) == "wait":
        return f"Loading: {waiting:,} of {models} {'does' if waiting == 1 else 'do'} not answer yet"
    return f"Not ready: {waiting:,} of {models} {'does' if waiting == 1 else 'do'} not answer"


def _item(model: ModelView, anchors: dict[int, str], text: str) -> str:
    anchor = anchors.get(id(model))
    name = escape(model.label) if anchor is None else f'<a href="#{anchor}">{escape(model.label)}</a>'
    mark = _WAIT if model.state == "loading" else _NO
    return f"<li>{mark} {name}: {escape(text)}</li>"


def _state(model: ModelView) -> str:
    reason = "" if model.reason == model.state else f": {brief(model.reason, _LONGEST_REASON)}"
    return f"{model.state}{reason}"


_YES = '<span class="mark" aria-hidden="true">✓</span>'
_WAIT = '<span class="mark wait" aria-hidden="true">…</span>'
_NO = '<span class="mark no" aria-hidden="true">✗</span>'


# --- totals -----------------------------------------------------------------------------------------------------------


def _figures(server: ServerView) -> str:
    recents = [model.recent for model in server.models if model.recent is not None]
    answered = sum(recent.per_second(recent.counts.answered) for recent in recents)
    waiting, in_flight = (
        sum(recent.queue_depth for recent in recents),
        sum(recent.in_flight for recent in recents),
    )
    slowest = max((p99 for recent in recents if (p99 := recent.request.p99) is not None), default=None)
    rejected = sum(sum(recent.counts.rejected.values()) for recent in recents) + sum(server.door.recent.values())
    worst = max((ratio for model in server.models if (ratio := model.drift_ratio) is not None), default=None)
    ready = len(server.models) - len(server.not_ready)
    return "\n".join(
        [
            '<dl class="figures">',
            figure(
                "Models ready",
                f"{ready:,} of {len(server.models):,}",
                over=any(model.state == "unavailable" for model in server.models),
            ),
            figure("Answered/s", formatting.number(answered), "all models"),
            figure("Highest p99", latency(slowest), "latency of a request"),
            figure("In flight", f"{in_flight:,}", f"{waiting:,} of them in a queue"),
            figure("Rejected", f"{rejected:,}", f"in the last {formatting.duration(WINDOW_SECONDS)}"),
            figure(
                "Highest drift", formatting.share(worst), "of a budget", over=any(m.over_budget for m in server.models)
            ),
            "</dl>",
        ]
    )


def _early_rejections(server: ServerView) -> str:
    """Return the table of requests rejected before they reached a model."""
    recent, total = server.door.recent, server.door.total
    if not total:
        return ""
    rows = [(code(reason), f"{recent.get(reason, 0):,}", f"{count:,}") for reason, count in total.items()]
    columns = ("reason", f"last {formatting.duration(WINDOW_SECONDS)}", "since the start")
    body = table("Requests rejected before they reached a model", columns, rows)
    return f"<section>\n{details(f'Rejected before reaching a model: {sum(total.values()):,}', body)}\n</section>"


def _models(server: ServerView, anchors: dict[int, str]) -> str:
    columns = ("model", "version", "state", "drift", "p99", "answered/s", "queue", "profile")
    rows = [_model(model, anchors.get(id(model))) for model in server.models]
    body = table(
        f"Last {formatting.duration(WINDOW_SECONDS)}; drift as a share of its budget",
        columns,
        rows,
        text_columns=3,
        wide=4,
    )
    return f'<section aria-labelledby="models">\n<h2 id="models">Models</h2>\n{body}\n</section>'


def _model(model: ModelView, anchor: str | None) -> tuple[str, ...]:
    recent, ratio = model.recent, model.drift_ratio
    name = escape(model.name)
    if anchor is not None:
        name = f'<a href="#{anchor}" aria-label="{escape(model.label)}">{name}</a>'
    drift = f'<span class="over">{formatting.share(ratio)}</span>' if model.over_budget else formatting.share(ratio)
    return (
        name,
        str(model.version),
        f'<span class="state {escape(model.state)}">{escape(model.state)}</span>',
        drift,
        formatting.NONE if recent is None else latency(recent.request.p99),
        formatting.NONE if recent is None else formatting.number(recent.per_second(recent.counts.answered)),
        formatting.NONE if recent is None else f"{recent.queue_depth:,}",
        escape(model.running.profile) if model.running is not None else formatting.NONE,
    )


def _footer(server: ServerView) -> str:
    return (
        "<footer>\n<p>Counts and percentiles cover the last"
        f" {formatting.duration(WINDOW_SECONDS)}, graphs the last {formatting.duration(SPAN_SECONDS)}. A percentile"
        " is estimated from histogram buckets, at most a factor of 2.5 off; means are exact.</p>\n"
        '<p>Probes: <a href="/livez">/livez</a>, <a href="/readyz">/readyz</a> on port'
        f" {server.http_port}.</p>\n</footer>"
    )
