"""The style sheet of the report and of the live page, for light and dark themes."""

from __future__ import annotations

PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --muted: #6b7280; --line: #d8dee4; --page: #fff; --tile: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --muted: #9aa4af; --line: #30363d; --page: #0d1117; --tile: #161b22; }
}
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; margin: 0 0 .25rem; }
h2 { margin: 3rem 0 1rem; padding-top: 1rem; border-top: 2px solid var(--line); overflow-wrap: anywhere; }
p.facts { color: var(--muted); margin: 0 0 1rem; }
nav a { color: inherit; margin-right: 1rem; }
dl { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; }
dl div { background: var(--tile); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem 1rem; }
dt { color: var(--muted); font-size: .8rem; }
dd { margin: 0; font-size: 1.35rem; font-weight: 600; }
figure { margin: 1.25rem 0; padding: .75rem; border: 1px solid var(--line); border-radius: .5rem; overflow-x: auto; }
figure img { display: block; width: 100%; min-width: 38rem; height: auto; }
p.summary { font-size: 1.15rem; margin: .75rem 0 1.25rem; }
summary { cursor: pointer; color: var(--muted); padding: .3rem 0; }
.wide { overflow-x: auto; margin: 1.25rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th { color: var(--muted); font-weight: 500; text-align: left; white-space: nowrap; }
th, td { padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.end td { border-bottom: 2px solid var(--muted); }
p.note { color: var(--muted); font-size: .85rem; margin: .4rem 0 0; white-space: pre-line; }
@media (max-width: 600px) {
  main { padding: 1rem .75rem 3rem; }
  h1 { font-size: 1.4rem; }
  dl div { flex: 1 1 40%; padding: .35rem .6rem; }
  dd { font-size: 1.1rem; }
  figure { padding: .4rem; }
  td, th { font-size: .85rem; padding-right: .6rem; white-space: nowrap; }
  td:last-child { white-space: normal; min-width: 12rem; }
  td.number:last-child { min-width: 0; white-space: nowrap; }
}
"""
"""CSS."""
