"""The live screen: one `Status` snapshot as a rich renderable of 80 or 100 columns.

From top to bottom: progress, reward and staleness, speed of both stages, load of the engines, nodes, and the planner's
last decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from libra_hpc.protocol.agents import LenderReport

from . import series
from .columns import rows_of
from .series import Record, duration, reward_changes
from .status import (
    LENDER_HEADS,
    LENDER_NUMBERS,
    STALE_S,
    NodeStatus,
    Status,
    accuracy_line,
    because,
    dry_run,
    estimate_line,
    failed_line,
    lender_rows,
)
from .summary import label_grid, reward_text, state_text

WIDTH = 100
"""Columns the screen is designed for; wider terminals are not stretched."""
SPARK_WIDTH = 24
BAR_WIDTH = 7
STALE_HEARTBEAT_S = 5.0
"""Age of a heartbeat that is shown in red; one comes about every second."""
SHOWN_NOTICES = 3
SHOWN_NODES, SHOWN_ODD, FEW = 16, 8, 2
"""Most nodes that have a row each; of more, odd ones that have; processes of a kind and state that have names."""
_SPARKS = "▁▂▃▄▅▆▇█"
ROLE_STYLES = {
    "planner": "blue",
    "train": "magenta",
    "rollout": "cyan",
    "env": "green",
    "to_train": "yellow",
    "to_rollout": "yellow",
    "lost": "bold red",
}
KINDS = {"t": "trainer", "e": "environment host", "c": "carrier"}
ENGINE_STYLES = {"ready": "green", "starting": "yellow", "standby": "dim", "lost": "bold red"}


def status_screen(
    status: Status, *, now: float, steps: Sequence[Record] = (), short: bool = False, every_node: bool = False
) -> Panel:
    """A snapshot at ``now``, epoch seconds; ``steps``: metrics of each step of all attempts.

    ``short``: without blank lines, lenders, estimates and counts, one row a role, and one line for the decision.
    ``every_node``: a row each, however many they are.
    """
    rows = {label: ", ".join(map(str, cells)) for label, cells in rows_of("running", status.numbers).items()}
    if status.estimate is not None:
        rows["estimate"] = estimate_line(status.estimate)
    if status.accuracy is not None:
        rows["step time"] = accuracy_line(status.accuracy)
    parts: list[RenderableType] = [
        _progress(status, now),
        _learning(status, steps, rows.pop("staleness", "-")),
        _stages(status) if short else _side_by_side(_stages(status), _buckets(status)),
        *([_roles(status.nodes)] if short else _nodes(status.nodes, every_node)),
        *([_lenders(status.lenders)] if status.lenders and not short else []),
        _footer(status, {} if short else rows, short=short, now=now),
    ]
    if not short:
        parts = [part for each in parts for part in (each, Text())][:-1]
    job = f"job {status.job_id}" if status.job_id else "no job"
    title = Text.assemble(
        (status.run, "bold"),
        (dry_run(status.speedup), "yellow"),
        f"  {job}" + (f", attempt {status.attempt}" if status.attempt > 1 else ""),
    )
    state = Text.assemble(" ", state_text(status.state), " ")
    return Panel(
        Group(*parts),
        title=Text.assemble(title, "  ", state),
        title_align="left",
        box=box.ROUNDED,
        padding=(0 if short else 1, 2),
        width=WIDTH,
    )


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """Values as at most ``width`` block characters, each a mean, scaled between the least and the greatest mean."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [round(i * len(finite) / count) for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _SPARKS[3] * count
    return "".join(_SPARKS[min(int((m - low) / (high - low) * len(_SPARKS)), len(_SPARKS) - 1)] for m in means)


def _progress(status: Status, now: float) -> Table:
    elapsed = max(now - status.started_at, 0.0)
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    left = ""
    if 0 < status.step < status.steps:
        left = f", about {duration(elapsed / status.step * (status.steps - status.step))} left"
    bar = ProgressBar(
        total=max(status.steps, 1), completed=status.step, complete_style="magenta", finished_style="green"
    )
    grid.add_row(
        Text.assemble(("step ", "dim"), (f"{status.step}", "bold"), f" / {status.steps}"),
        bar,
        f"{duration(elapsed)}{' by the clock' * bool(dry_run(status.speedup))}{left}",
    )
    return grid


def _side_by_side(*parts: RenderableType) -> Columns:
    """One above the other on a narrow screen."""
    return Columns(parts, padding=(0, 2), expand=True)


def _learning(status: Status, steps: Sequence[Record], staleness: str) -> Columns:
    changes = Text("   ").join(reward_text(change) for change in reward_changes(steps, status.steps))
    reward = Text.assemble(("reward ", "dim"), changes)
    if steps:
        reward.append("   ").append(sparkline(series.column(steps, "reward")), style="green")
    limits = Text.assemble(("weights ", "dim"), f"v{status.version}   ", ("staleness ", "dim"), staleness)
    return _side_by_side(reward, limits)


def _stages(status: Status) -> Table:
    stages = _table("stage", ("nodes", "right"), ("generated/s", "right"), ("s/batch", "right"), "busy")
    for name, stage in (("train", status.train), ("rollout", status.rollout)):
        seconds = f"{stage.step_s:.2f}" if stage.step_s else "-"
        cells = (str(stage.nodes), f"{stage.tokens_per_s:,.0f}", seconds, _bar(stage.busy, "magenta"))
        stages.add_row(Text(name, style=ROLE_STYLES[name]), *cells)
    return stages


def _buckets(status: Status) -> Table:
    buckets = _table("bucket", ("engines", "right"), ("turns", "right"), ("open", "right"), "KV cache")
    for bucket in status.buckets:
        cells = (str(bucket.engines), str(bucket.inflight), str(bucket.trajectories), _bar(bucket.kv_use, "cyan"))
        buckets.add_row(f"TP {bucket.tp}", *cells)
    return buckets


def _nodes(nodes: Sequence[NodeStatus], every: bool) -> list[RenderableType]:
    """A row each; of many, unless ``every`` one is wanted, one a role, and the odd ones."""
    if every or len(nodes) <= SHOWN_NODES:
        return [_each(nodes)]
    newest = max(node.version for node in nodes)
    odd = sorted((node for node in nodes if _is_odd(node, newest)), key=lambda node: node.role != "lost")
    more = Text(f"{len(odd) - SHOWN_ODD:,} more: libra-hpc status --nodes")
    return [_roles(nodes), *[_each(odd[:SHOWN_ODD])] * bool(odd), *[more] * (len(odd) > SHOWN_ODD)]


def _is_odd(node: NodeStatus, newest: int) -> bool:
    """Whether it is lost, silent, or has lost processes or weights that are not nearly the newest."""
    late = node.heartbeat_age_s > STALE_HEARTBEAT_S or 0 <= node.version < newest - 1
    return late or "lost" in (node.role, *node.engines.values())


def _each(nodes: Sequence[NodeStatus]) -> Table:
    table = _table(
        ("rank", "right"), "host", "component", "role", "processes", ("weights", "right"), ("heartbeat", "right")
    )
    table.expand = True
    # The only column that may take several lines.
    table.columns[4].no_wrap = False
    for node in nodes:
        age_s = node.heartbeat_age_s
        table.add_row(
            str(node.rank),
            Text(node.host),
            node.component,
            _role(node.role),
            _processes([node], FEW) or Text("-", style="dim"),
            f"v{node.version}" if node.version >= 0 else "-",
            Text("-" if node.role == "ended" else f"{age_s:.1f} s", style="red" if age_s > STALE_HEARTBEAT_S else ""),
            style="dim" if node.role == "lost" else "",
        )
    return table


def _role(role: str) -> Text:
    return Text(role.replace("to_", "→ "), style=ROLE_STYLES.get(role, ""))


def _processes(nodes: Sequence[NodeStatus], few: int) -> Text:
    """Processes by kind and state: up to ``few`` with names, else counted; carriers only where they are not ready."""
    found: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        for name, state in node.engines.items():
            if (name[0], state) != ("c", "ready"):
                found.setdefault((KINDS.get(name[0], "engine"), state), []).append(name)
    texts = [
        Text.assemble(shown, " ", (state, ENGINE_STYLES.get(state, "")))
        for (kind, state), names in sorted(found.items())
        for shown in (sorted(names) if len(names) <= few else [f"{len(names):,} {kind}{'s' * (len(names) > 1)}"])
    ]
    return Text(", ").join(texts)


def _roles(nodes: Sequence[NodeStatus]) -> Table:
    by_role: dict[str, list[NodeStatus]] = {}
    for node in nodes:
        by_role.setdefault(node.role, []).append(node)
    table = _table("role", ("nodes", "right"), "processes", "weights", ("heartbeat", "right"))
    table.columns[2].no_wrap = False
    for role, found in by_role.items():
        oldest, versions = max(node.heartbeat_age_s for node in found), sorted({node.version for node in found} - {-1})
        weights = " to ".join(f"v{version}" for version in dict.fromkeys((*versions[:1], *versions[-1:]))) or "-"
        beat = "-" if role == "ended" else f"{oldest:.1f} s"
        table.add_row(_role(role), f"{len(found):,}", _processes(found, 0), weights, beat)
    return table


def _lenders(found: Sequence[LenderReport]) -> Table:
    table = _table(*((head, "right") if head in LENDER_NUMBERS else head for head in LENDER_HEADS))
    for column in (table.columns[0], table.columns[-1]):
        column.no_wrap, column.overflow = False, "fold"
    for row in lender_rows(found):
        table.add_row(*row)
    return table


def _footer(status: Status, rows: Mapping[str, str], *, short: bool, now: float) -> Table:
    grid = label_grid()
    for label, text in rows.items():
        grid.add_row(label, text)
    if status.failures:
        grid.add_row("failed", Text(failed_line(status.failures), style="red" if status.paused else "yellow"))
    _add_warnings(grid, "slow", status.slow)
    decision = _decision(status, now)
    if short:
        decision.no_wrap, decision.overflow = True, "ellipsis"
    grid.add_row("planner", decision)
    if status.repartitioned:
        grid.add_row("repartition", Text(status.repartitioned))
    if status.orders:
        grid.add_row("orders", Text(status.orders))
    if status.message:
        grid.add_row("message", Text(status.message, style="yellow"))
    _add_warnings(grid, "lately", status.notices)
    if now - status.updated_at > STALE_S:
        silent = f"no news for {duration(now - status.updated_at)}: the job may be suspended or gone"
        grid.add_row("stale", Text(silent, style="red"))
    return grid


def _add_warnings(grid: Table, label: str, sentences: Sequence[str]) -> None:
    for number, sentence in enumerate(sentences[:SHOWN_NOTICES]):
        grid.add_row("" if number else label, Text(sentence, style="yellow"))


def _decision(status: Status, now: float) -> Text:
    decision = status.decision
    if decision is None:
        return Text("no decision yet", style="dim")
    moved = f"node{'s' if len(decision.nodes) > 1 else ''} {', '.join(map(str, decision.nodes or (decision.node,)))}"
    what = decision.action if decision.node < 0 else f"{moved} {decision.action.replace('to_', '→ ')}"
    # The clock's times of a dry run are shown as its own.
    ago = duration(max(now - decision.at, 0.0) * status.speedup)
    return Text.assemble(
        (what, "bold yellow" if decision.action != "hold" else "bold"),
        (f"  {ago} ago  ", "dim"),
        because(decision.reason, decision.action),
    )


def _bar(share: float, style: str) -> Text:
    share = min(max(share, 0.0), 1.0)
    full = round(share * BAR_WIDTH)
    return Text.assemble(("━" * full, style), ("─" * (BAR_WIDTH - full), "bright_black"), f" {share:4.0%}")


def _table(*columns: str | tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim underline")
    for column in columns:
        name, justify = (column, "left") if isinstance(column, str) else column
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    return table
