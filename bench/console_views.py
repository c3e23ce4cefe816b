"""How long each view of the console takes to load: `python -m bench.console_views`.

A headless Chromium opens each view afresh, in turns, on a live cluster of processes (two prefill
and two decode nodes with the demo model) whose clients ask one request after the other. A time
counts from the navigation to the first moment at which the page shows the view's data, by the
browser's clock. The browser, its cache empty at the first round, shares the machine's cores with
the cluster.

Prints one JSON object: per view the median, the least and the longest of the rounds, milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.console.browser import Visit, browser, visit
from tests.console.live import KEY, live_console

LOADED: Final = {
    "cluster": ".card", "requests": "tbody tr", "request": ".gantt rect", "node": ".blocks canvas",
    "transfer": ".flow-cell", "events": "tbody tr", "playground": ".ask", "break": "progress",
}  # fmt: skip
STAMP: Final = """
sessionStorage.setItem('baton-console-key', KEY);
const [, view, id] = location.hash.split('/');
const wanted = LOADED[view === 'requests' && id ? 'request' : view];
new MutationObserver((_, observer) => {
  if (!document.querySelector(wanted)) return;
  observer.disconnect();
  document.documentElement.dataset.loadedAt = performance.now();
}).observe(document, { subtree: true, childList: true, attributes: true });
"""


async def load_ms(tab: Visit, address: str) -> float:
    """From a fresh navigation to the view with its data."""
    await tab.page.goto("about:blank")
    await tab.page.goto(f"{tab.origin}/console#/{address}")
    await tab.page.wait_for_selector("html[data-loaded-at]", state="attached")
    return float(await tab.page.get_attribute("html", "data-loaded-at") or "nan")


async def measured(rounds: int, clients: int) -> dict[str, list[float]]:
    """Return the times of each view, in so many rounds over all views."""
    taken: dict[str, list[float]] = {view: [] for view in LOADED}
    stamp = f"const KEY = {json.dumps(KEY)}, LOADED = {json.dumps(LOADED)};{STAMP}"
    stamp = f"if (location.protocol !== 'about:') {{ {stamp} }}"
    with tempfile.TemporaryDirectory() as directory:
        flags = ("--break-socket", str(Path(directory) / "none.sock"))  # view 7 is there
        async with (
            browser() as chromium,
            live_console(Path(directory), flags=flags) as live,
            live.busy(clients),
        ):
            name = (await live.complete("PagedAttention is", 20))["id"]
            async with visit(chromium, live.admin) as tab:
                await tab.page.add_init_script(stamp)
                for _ in range(rounds):
                    for view, times in taken.items():
                        address = f"requests/{name}" if view == "request" else view
                        times.append(await load_ms(tab, address))
                        sys.stderr.write(f"{view} {times[-1]:.0f} ms\n")
    return taken


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.console_views", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="over all views")
    parser.add_argument("--clients", type=int, default=3, help="that keep the cluster busy")
    given = parser.parse_args(arguments)
    taken = asyncio.run(measured(given.rounds, given.clients))
    found = {
        view: {"median": round(statistics.median(times)), "least": round(min(times)),
               "longest": round(max(times)), "rounds": len(times)}
        for view, times in taken.items()
    }  # fmt: skip
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
