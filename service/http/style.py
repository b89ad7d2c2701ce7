"""The status page's style. Colours, cards and figures match the converter's report (its template.html)."""

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f8fa; --card: #ffffff; --text: #1b222b; --muted: #56616e; --rule: #d6dce3; --grid: #e4e8ed;
  --accent: #1b5fb5; --accent-soft: #cfe0f5; --good: #146c2e; --good-soft: #e6f4ea; --bad: #b3261e;
  --bad-soft: #fdecea; --wait: #7a4f00; --wait-soft: #fdf3dc; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0f141a; --card: #171d25; --text: #e7edf3; --muted: #a3afbb; --rule: #303a45; --grid: #28313b;
  --accent: #74b3ff; --accent-soft: #1f3a5a; --good: #6fd08c; --good-soft: #14301d; --bad: #ff9a91;
  --bad-soft: #3d1a18; --wait: #f0c674; --wait-soft: #352a12; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; scroll-padding-top: 1rem; }
body { margin: 0; background: var(--page); color: var(--text); overflow-wrap: break-word;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
header, main, footer { max-width: 68rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 1.6rem; display: flex; flex-wrap: wrap; justify-content: space-between; gap: .25rem 1.5rem; }
header p { margin: 0; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; line-height: 1.35; margin: 0 0 .5rem; }
h3 { font-size: .95rem; margin: 1.1rem 0 .35rem; }
p { margin: .25rem 0 .5rem; max-width: 46rem; }
h2, h3, p, li, dd, summary, caption, code, tbody a { overflow-wrap: anywhere; }
a { color: var(--accent); }
a:focus-visible, summary:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
.skip { position: absolute; left: 1rem; top: -4rem; background: var(--card); padding: .4rem .8rem; z-index: 1; }
.skip:focus { top: .4rem; }
.muted { color: var(--muted); }
.links { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: 0; padding: 0; list-style: none; font-size: .9rem; }
.links a { display: inline-block; padding: .25rem 0; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem; padding: 1rem 1.1rem;
  margin: 1rem 0; }
.verdict { border-left: .4rem solid var(--good); background: var(--good-soft); }
.verdict.bad { border-left-color: var(--bad); background: var(--bad-soft); }
.verdict.wait { border-left-color: var(--wait); background: var(--wait-soft); }
.verdict h2 { font-size: 1.3rem; margin: 0; }
.verdict ul { margin: .5rem 0 0; padding: 0; list-style: none; }
.verdict li { margin: .3rem 0; }
.mark { font-weight: 700; }
.ready, .mark { color: var(--good); }
.unavailable, .mark.no, .over { color: var(--bad); }
.loading, .mark.wait { color: var(--wait); }
.state { font-size: .85rem; font-weight: 600; white-space: nowrap; border-radius: 1rem; padding: .1rem .6rem; }
.state.ready { background: var(--good-soft); }
.state.unavailable { background: var(--bad-soft); }
.state.loading { background: var(--wait-soft); }
.reason { white-space: pre-wrap; border-left: .25rem solid var(--bad); padding-left: .7rem; }
.reason.loading { border-left-color: var(--wait); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 9.5rem), 1fr)); gap: .6rem;
  margin: 1rem 0; }
.figures div { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem; padding: .6rem .75rem; }
.figures dt { color: var(--muted); font-size: .85rem; }
.figures dd { margin: 0; font-size: 1.35rem; font-weight: 650; font-variant-numeric: tabular-nums; line-height: 1.35; }
.figures small { display: block; font-size: .8rem; font-weight: 400; color: var(--muted); }
.trends { grid-template-columns: repeat(auto-fit, minmax(min(100%, 13.5rem), 1fr)); margin: .75rem 0; }
.trends div { display: flex; flex-direction: column; }
.trends dd { display: flex; flex-direction: column; flex: 1; }
.trends .spark { margin-top: auto; }
.spark { display: block; width: 100%; height: 2.75rem; }
p.spark { font-size: .8rem; font-weight: 400; color: var(--muted); height: auto; min-height: 2.75rem;
  padding-top: .5rem; }
.spark path { vector-effect: non-scaling-stroke; }
.trace { fill: var(--accent-soft); stroke: var(--accent); stroke-width: 1.5; stroke-linejoin: round; }
.limit { fill: none; stroke: var(--bad); stroke-width: 1.25; stroke-dasharray: 5 4; }
.pair { display: grid; grid-template-columns: 5fr 6fr; gap: 0 2rem; }
.pair > div { min-width: 0; }
.pair.left { grid-template-columns: 11fr 7fr; }
table { border-collapse: collapse; width: 100%; margin: .25rem 0; font-size: .9rem; }
caption { text-align: left; color: var(--muted); font-size: .85rem; padding-bottom: .25rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
thead th { color: var(--muted); font-weight: 600; }
tbody th { font-weight: 400; }
tbody .group { color: var(--muted); padding-top: .6rem; }
tr > :last-child { padding-right: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.meter { display: inline-block; vertical-align: middle; width: 4.5rem; height: .5rem; border-radius: .25rem; }
.meter .track { fill: var(--grid); }
.meter .used { fill: var(--accent); }
.meter .used.full { fill: var(--bad); }
.range { white-space: normal; }
.share { display: inline-block; min-width: 3.2em; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.25rem; margin: .25rem 0;
  font-size: .9rem; }
.facts dt { color: var(--muted); }
.facts dd { margin: 0; min-width: 0; }
code { font: .92em ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
details { margin-top: .6rem; }
section > details:first-child { margin: 0; }
summary { cursor: pointer; color: var(--accent); padding: .2rem 0; }
footer { color: var(--muted); font-size: .85rem; padding-bottom: 2rem; }
@media (max-width: 72rem) { .pair.left { grid-template-columns: 1fr; } }
@media (max-width: 64rem) {
  .figures { grid-template-columns: repeat(3, 1fr); }
  .trends { grid-template-columns: repeat(2, 1fr); }
  .pair { grid-template-columns: 1fr; }
}
@media (max-width: 40rem) {
  body { font-size: 15px; }
  section { padding: .8rem; }
  .figures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 8.6rem), 1fr)); }
  .figures dd { font-size: 1.15rem; }
  .trends { grid-template-columns: 1fr; }
  table { font-size: .85rem; }
  .wide { display: none; }
  .facts { grid-template-columns: 1fr; gap: 0; }
  .facts dd { margin-bottom: .5rem; }
  th, td { padding-right: .4rem; }
  .meter { display: none; }
  .share { min-width: 0; }
}
@media (max-width: 27rem) {
  table { font-size: .8rem; }
  table .state { font-size: .75rem; padding: .1rem .4rem; }
}
@media (max-width: 22rem) {
  section { padding: .6rem; }
  table { font-size: .75rem; }
  table .state { font-size: .7rem; padding: .1rem .3rem; }
  th, td { padding-right: .25rem; }
}
@media (prefers-reduced-motion: no-preference) { html { scroll-behavior: smooth; } }
@media (forced-colors: active) { .trace { stroke: CanvasText; } .limit { fill: none; stroke: Highlight; } }
@media print { body { background: #fff; font-size: 10pt; } section { break-inside: avoid; } .skip { display: none; } }
"""
