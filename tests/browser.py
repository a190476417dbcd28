"""A page in a real browser, headless and without a network: what it shows and what goes wrong."""

import json
import re
import shutil
import subprocess
import tempfile
from html import escape, unescape
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_MEASURE = """
<script>
addEventListener("load", () => {
  const measured = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    return {
      width: root.clientWidth,
      content_width: root.scrollWidth,
      charts: [...page.querySelectorAll("section.chart")].map(chart => ({
        title: chart.querySelector("h2").textContent,
        drawings: [...chart.querySelectorAll("svg")].map(svg => {
          const {width, height} = svg.getBoundingClientRect();
          const shapes = [...svg.querySelectorAll("rect,polyline,circle")].filter(shape => {
            const box = shape.getBoundingClientRect();
            return box.width + box.height > 0 && getComputedStyle(shape).visibility === "visible";
          });
          const paint = shapes.map(shape => getComputedStyle(shape)).map(s => s.fill === "none" ? s.stroke : s.fill);
          const texts = [...svg.querySelectorAll("text")];
          const texts_px = texts.map(text => parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a);
          return {width, height, shapes: shapes.length, unpainted: paint.filter(p => p === "none").length,
                  least_text_px: Math.min(...texts_px)};
        }),
      })),
    };
  });
  const result = document.createElement("pre");
  result.id = "measured";
  result.textContent = JSON.stringify(measured);
  document.body.append(result);
});
</script>
"""


def measure(page: Path, widths: tuple[int, ...]) -> list[dict[str, Any]]:
    """What the browser makes of `page` at these widths in pixels, as `_MEASURE` collects it.

    Fails on a script error, or on anything else that the browser writes to its console.
    """
    assert BROWSER is not None
    text = escape(page.read_text(encoding="utf-8"), quote=True)
    frames = "".join(
        f'<iframe width="{width}" height="900" srcdoc="{text}" frameborder="0"></iframe>' for width in widths
    )
    with tempfile.TemporaryDirectory() as directory:
        outer = Path(directory) / "outer.html"
        outer.write_text(f'<!doctype html><meta charset="utf-8"><body>{_MEASURE}{frames}</body>', encoding="utf-8")
        done = subprocess.run(
            [*_COMMAND, f"--user-data-dir={directory}/profile", "--dump-dom", outer.as_uri()],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, done.stdout[:2000] + done.stderr
    measured: list[dict[str, Any]] = json.loads(unescape(found[1]))
    return measured


_COMMAND = (
    *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--window-size=1400,1000"),
)
