"""`baton status`: a live table of nodes, their load, and requests by state. It asks over gRPC."""

from __future__ import annotations

import threading

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.client import Client, Migrations, Node, ServerInfo
from baton.protocol.errors import BatonError
from baton.runtime.tls import ClientTls

REFRESH_S = 1.0
BAR_CELLS = 10
WIDE_COLUMNS = 100  # least width of a screen with room for the bar
ABOVE_LIMITS = (
    "above 100%: the machine's limits were measured while it was busy (a node measures again once "
    "it is idle), or its caches hold the model; --memory-bandwidth and --peak-flops state them"
)


def status(
    address: str,
    admin_key: str | None,
    once: bool,
    console: Console,
    tls: ClientTls | None = None,
) -> int:
    """Show the table until Ctrl-C, or once. Raises BatonError if the first question fails."""
    with Client(address, admin_key or "", timeout_s=5.0, tls=tls) as client:
        info = client.server_info()
        if once:
            console.print(view(info, address, console.width))
            return 0
        pause = (
            threading.Event()
        )  # never set: its wait is the refresh interval, cut short by Ctrl-C
        shown = view(info, address, console.width)
        with Live(shown, console=console, auto_refresh=False) as live:
            while not pause.wait(REFRESH_S):
                live.update(_ask_again(client, address, console.width), refresh=True)
    return 0


def _ask_again(client: Client, address: str, width: int) -> RenderableType:
    """Return the table, or the error of a router that is away, which does not end the display."""
    try:
        return view(client.server_info(), address, width)
    except BatonError as error:
        return Text(f"router at {address}: {error}", style="red")


def view(info: ServerInfo, address: str, width: int) -> RenderableType:
    """Return everything on one screen of `width` columns."""
    models = ", ".join(sorted({node.model for node in info.nodes})) or "no model"
    head = Text.assemble(("baton ", "bold"), f"{info.version}  {models}  router {address}")
    lines: list[RenderableType] = [head, nodes_table(info, width >= WIDE_COLUMNS)]
    lines += precision_lines(info)
    if any(above_limits(node) for node in info.nodes):
        lines.append(Text(ABOVE_LIMITS, style="yellow"))
    lines.append(requests_line(info))
    if info.migrations != Migrations():
        lines.append(migrations_line(info.migrations))
    return Group(*lines)


def nodes_table(info: ServerInfo, wide: bool) -> Table:
    """Return a table with a row per node, prefill first. A narrow screen gets no bars."""
    table = Table(box=box.SIMPLE, padding=(0, 1 if wide else 0), pad_edge=wide)
    table.add_column("node", overflow="fold")  # this column shrinks: the name is the user's own
    for name in ("role", "address"):
        table.add_column(name, no_wrap=True)
    measured = any(node.mbu or node.mfu for node in info.nodes)
    for name in ("running", "waiting", *(("MBU", "MFU") if measured else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV blocks in use", no_wrap=True)
    for node in sorted(info.nodes, key=lambda node: (node.role != "prefill", node.node_id)):
        name = f"{node.node_id} (draining)" if node.draining else node.node_id
        counts = [str(node.running), str(node.waiting)]
        if measured:  # shares of what the machine can read and multiply, over the last steps
            counts += [f"{node.mbu:.0%}", f"{node.mfu:.0%}"]
        table.add_row(name, node.role, node.address, *counts, usage(node, wide))
    if not info.nodes:
        table.add_row("no node is registered")
    return table


def above_limits(node: Node) -> bool:
    """Whether a share is above 100 %, which cannot be."""
    return max(node.mbu, node.mfu) >= 1.005


def usage(node: Node, with_bar: bool) -> Text:
    """Return a bar and its numbers, or without a bar the numbers in the bar's colour."""
    used = node.total_blocks - node.free_blocks
    share = used / node.total_blocks if node.total_blocks else 0.0
    filled = round(share * BAR_CELLS)
    colour = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    numbers = f"{used}/{node.total_blocks} ({share:.0%})"
    if not with_bar:
        return Text(numbers, style=colour)
    bar = Text("█" * filled, style=colour)
    bar.append("░" * (BAR_CELLS - filled), style="dim")
    bar.append(f" {numbers}", style="default")
    return bar


def precision_lines(info: ServerInfo) -> list[Text]:
    """Return a line for each role whose nodes would not compute the same tokens."""
    lines: list[Text] = []
    for role in ("prefill", "decode"):
        nodes = [node for node in info.nodes if node.role == role and node.precision]
        if len({node.precision for node in nodes}) > 1:
            each = ", ".join(f"{node.node_id} {node.precision}" for node in nodes)
            text = f"{role} nodes differ in precision, a failover may change tokens: {each}"
            lines.append(Text(text, style="red"))
    return lines


def requests_line(info: ServerInfo) -> Text:
    """Return a line such as `requests: 3 decode, 1 prefill`."""
    counts = [
        f"{count} {state}" for state, count in sorted(info.requests_by_state.items()) if count
    ]
    return Text(f"requests: {', '.join(counts) or 'none'}")


def migrations_line(moves: Migrations) -> Text:
    """Return a line such as `migrations: 3 done (1204 tokens, 18 ms each), 1 given back, 0
    failed`.
    """
    each_ms = 1000 * moves.seconds / moves.done if moves.done else 0.0
    done = f"{moves.done} done ({moves.tokens} tokens, {each_ms:.0f} ms each)"
    return Text(f"migrations: {done}, {moves.given_back} given back, {moves.failed} failed")
