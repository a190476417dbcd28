"""The frame of a report: one HTML page without a single outside reference, readable in light and dark."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root{color-scheme:light dark;--ink:#1d2329;--soft:#5f6b76;--page:#f6f7f8;--card:#fff;--edge:#dfe3e7;
--c0:#2563eb;--c1:#d97706;--c2:#059669;--c3:#dc2626;--c4:#7c3aed;--c5:#0891b2;--c6:#9f5f1a;--c7:#64748b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#98a3ad;--page:#14181c;--card:#1c2227;--edge:#313940;
--c0:#6ea0ff;--c1:#f0a545;--c2:#3fc493;--c3:#f47272;--c4:#ab8bf5;--c5:#3fbad4;--c6:#c99763;--c7:#94a3b8}}
*{box-sizing:border-box;min-width:0}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}
.fact,.sub,.note,.legend{overflow-wrap:anywhere}
h1{font-size:24px;margin:0 0 2px}h2{font-size:15px;margin:0 0 8px;font-weight:600}
.sub,.note{color:var(--soft);margin:0 0 18px}.note{margin:6px 0 0;font-size:13px}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:12px;margin:0 0 16px}
.fact,.chart{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:12px 14px}
.fact b{display:block;font-size:16px;font-weight:600;font-variant-numeric:tabular-nums}
.fact span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));gap:14px}
.wide{grid-column:1/-1;overflow-x:auto}
svg{width:100%;height:auto;display:block;overflow:visible}
svg text{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}
.grid{stroke:var(--edge)}.mark{stroke:var(--soft);stroke-dasharray:4 3}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0 0;font-size:13px;color:var(--soft)}
.key{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px;vertical-align:-1px}
pre{margin:0;overflow-x:auto;font-size:13px;line-height:1.45}
@media(max-width:640px){main{padding:16px 10px 40px}.fact,.chart{padding:10px}
.facts{grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:8px}
svg text{font-size:15px}.wide svg{min-width:900px}.wide svg text{font-size:11px}}
"""


@dataclass(frozen=True)
class Chart:
    """A titled block of ready HTML; `note` is plain text below it."""

    title: str
    html: str
    note: str = ""
    wide: bool = False


def page(title: str, subtitle: str, facts: Sequence[tuple[str, str]], charts: Sequence[Chart]) -> str:
    """The whole document. Everything but the charts' own HTML is escaped here.

    Args:
        title: heading and window title.
        subtitle: one line below it.
        facts: (name, value) pairs, shown large.
        charts: blocks in order.
    """
    colours = "".join(
        f".s{n}.fill{{fill:var(--c{n})}}.s{n}.line{{stroke:var(--c{n})}}.s{n}.key{{background:var(--c{n})}}"
        for n in range(8)
    )
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{colours}</style></head>"
    )
    shown = "".join(f"<div class=fact><span>{escape(n)}</span><b>{escape(v)}</b></div>" for n, v in facts)
    return (
        f"{head}<body><main><h1>{escape(title)}</h1><p class=sub>{escape(subtitle)}</p>"
        f"<div class=facts>{shown}</div><div class=charts>{''.join(map(_block, charts))}</div></main></body></html>\n"
    )


def preformatted(text: str) -> str:
    """Text as it stands, in a fixed-width font."""
    return f"<pre>{escape(text)}</pre>"


def _block(chart: Chart) -> str:
    note = f"<p class=note>{escape(chart.note)}</p>" if chart.note else ""
    return f'<section class="chart{" wide" * chart.wide}"><h2>{escape(chart.title)}</h2>{chart.html}{note}</section>'
