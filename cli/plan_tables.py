"""The tables and sentences of `libra-hpc plan`, at most `libra_hpc_cli.output.WIDTH` columns wide."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from libra_hpc.config.run_file_text import toml_value
from libra_hpc.models.memory import USABLE
from libra_hpc.planning.in_turn import in_turn_of
from libra_hpc.planning.initial import InitialPlan
from libra_hpc.planning.request import PlanRequest, PlanResult, RunPlan
from libra_hpc.planning.scaling_curve import ScalingPoint

from .output import WIDTH, PlainConsole, console, gigabytes, narrow_table, print_line, show

NEAREST = 3
"""Excluded choices that are printed without ``--explain``."""
CLOSE = 0.02
"""Relative difference below which stages count as balanced, or rollout as bound by its longest trajectory."""
TERMS = {
    "products": "products of layers",
    "attention": "attention",
    "elementwise": "elementwise operations of layers",
    "head": "head over loss tokens",
    "gradients": "sums of gradients",
    "bubble": "pipeline fills and drains",
    "tp": "tensor-parallel all-reduce",
    "pp": "activations between stages",
    "cp": "keys and values of context ranks",
    "ep": "expert exchange",
    "dp": "gradient reduction, not hidden",
    "exchange": "exchange with hybrid nodes",
    "optimizer": "update",
}


LEGEND = """nodes: training + rollout; TP, PP, CP, EP, DP: tensor, pipeline, context, expert, data parallel;
4xTP8: four engines of eight GPUs; tokens/s: trained; GB: of a training GPU"""
"""Under the table of plans."""


def title(asked: PlanRequest, *, sized: bool = True) -> str:
    """Model and devices in a line, with their number if ``sized``."""
    parts = [
        (
            f"{p.devices} x {p.device.name} ({p.nodes} nodes of {p.node_devices})"
            if sized
            else f"{p.device.name}, nodes of {p.node_devices}"
        )
        for p in asked.pools
    ]
    return f"{asked.shape.name} on {' + '.join(parts)}"


def steps_from(sources: Sequence[str]) -> str:
    """Where the seconds of rollout steps come from: operator tables, measured, or roofline."""
    return ", steps from " + ", ".join(dict.fromkeys(re.split(r" of | \(|:", source)[0] for source in sources))


def header(asked: PlanRequest, steps: str, *, sized: bool = True) -> None:
    """Print model, devices, the source of ``steps``, batch and lengths of the request."""
    eta = asked.settings.eta
    stages = f"eta {eta} (stages {'overlap' if eta else 'take turns'})"
    show(Text(f"{title(asked, sized=sized)}{steps}\n{asked.trajectories:,} trajectories a batch, {stages}"))
    show(Text(f"lengths: {asked.work.source}"))
    show(Text(f"  {asked.work.summary(asked.settings.batch_groups)}"))
    for line in asked.notes:
        show(Text(f"note: {line}"))


def plans(asked: PlanRequest, result: PlanResult) -> Table:
    """One row for each plan, best first."""
    table = narrow_table("nodes>~", "train as~", "train>~", "rollout as~", "rollout>~", "batch>~", "tokens/s>~", "GB>~")
    for plan in result.plans:
        cells = [
            _nodes(asked, plan),
            str(plan.train.layout),
            short_s(plan.train.time.total),
            classes(asked, plan),
            short_s(plan.rollout_s),
            f"{short_s(plan.seconds)} ±{plan.error_s / plan.seconds:.0%}",
            f"{plan.tokens_s:,.0f}",
            f"{plan.train.memory.total / 1e9:.0f}",
        ]
        table.add_row(*cells, style="bold" if plan is result.plans[0] else None)
    return table


def remarks(asked: PlanRequest, result: PlanResult) -> None:
    """Print the legend, and what limits the best plan."""
    show(Text(LEGEND, style="dim"))
    best = result.plans[0]
    layout = best.train.layout
    show(Text(f"best: {_limit(asked, result)}"))
    show(
        Text(
            f"its training: micro-batches of {layout.micro_tokens:,} tokens{layout.recomputed},"
            f" {best.train.time.mfu:.0%} of peak FLOP/s (MFU)"
        )
    )
    wanted = asked.hybrid.nodes(asked.pools[best.pool].nodes - best.nodes)
    if wanted > best.hybrid:
        show(Text(f"note: no training layout of {best.nodes} nodes fits on hybrid nodes too, so it has none"))
    if not best.snapshots:
        show(Text("note: its nodes have too little memory for snapshots: train.snapshot_every = 0"))
    show(Text(f"new weights ({asked.updated_from}): {best.update.words(best.least_tp)}"))
    # Without their TP degrees.
    sources = dict.fromkeys(re.sub(r" on \d+ x ", " on ", source) for source in result.sources)
    show(Text(f"rollout steps: {', '.join(sources)}"))
    show(Text(f"rollout, batch: played in the simulator, {best.played} batches of the first row; ±: two errors"))


def _limit(asked: PlanRequest, result: PlanResult) -> str:
    """What the best plan waits for."""
    best = result.plans[0]
    train_s, eta = best.train.time.total, asked.settings.eta
    if best.in_turn or not eta:
        what = "the stages take turns"
    elif train_s >= (1 - CLOSE) * best.seconds:
        what = "training is the slower stage"
    else:
        what = f"rollout is the slower stage; training waits for {1 - train_s / best.seconds:.0%} of the time"
    if result.straggler >= (1 - CLOSE) * best.rollout_s * (eta + 1):
        what += (
            f"; rollout waits for its longest trajectory ({short_s(result.straggler)}), more nodes would not help it"
        )
    return what


def shared(asked: PlanRequest, result: PlanResult) -> None:
    """Print what nodes that serve both stages in turn would bring, and what the run file needs for it."""
    for plan, even_s in in_turn_of(result):
        assert plan.in_turn is not None
        needs = " and ".join(f"{key} = {toml_value(value)}" for key, value in plan.in_turn.keys.items())
        show(
            Text(
                f"in turn: {_nodes(asked, plan)} nodes serve both stages, {short_s(plan.seconds)} a batch with"
                f" {short_s(plan.in_turn.switch_s)} of switches ({asked.switch_from})"
                + ("; the best split is as fast" if even_s < float("inf") else "")
                + (f" at {short_s(even_s)}" if 0.0 < even_s < float("inf") else " without any" if even_s <= 0.0 else "")
                + f"; needs {needs}"
            )
        )


def _nodes(asked: PlanRequest, plan: RunPlan) -> str:
    """Nodes that train and that roll out."""
    return f"{_pool(asked, plan.pool)}{plan.trains}+{plan.rolls(sum(p.nodes for p in asked.pools))}"


def speed(asked: PlanRequest, result: PlanResult) -> None:
    """Print the source of the training speed."""
    mfu = result.plans[0].train.time.mfu
    show(Text(f"training speed: {asked.train_speed or f'assumed, {mfu:.0%} MFU (measured ones: planner.train_speed)'}"))


def nearest(result: PlanResult) -> None:
    """Print the excluded choices that nearly fit."""
    if not result.excluded:
        print_line("nothing was excluded")
        return
    count = len(result.excluded)
    print_line(f"{count} {'choice does' if count == 1 else 'choices do'} not fit (--explain for all):")
    for entry in result.excluded[:NEAREST]:
        show(Text(f"  {entry.what}: {entry.limit.reason}"))


def terms(result: PlanResult) -> Table:
    """Where the training time of the best plan goes."""
    time = result.plans[0].train.time
    table = narrow_table("training of the best plan~", "time>~", "share>~")
    for name, words in TERMS.items():
        if seconds := time.parts.get(name):
            table.add_row(words, short_s(seconds), f"{seconds / time.total:.0%}")
    table.add_row(
        f"all, {time.micro_batches} micro-batches per replica and update", short_s(time.total), "100%", style="bold"
    )
    return table


def memory(asked: PlanRequest, result: PlanResult) -> Table:
    """Memory of a training device in the best plan."""
    best = result.plans[0]
    needs, usable = best.train.memory, USABLE * asked.pools[best.pool].device.memory_bytes
    table = narrow_table("memory of a training GPU~", "GB>~")
    for name, size in needs.terms().items():
        table.add_row(name, gigabytes(size))
    table.add_row(f"all, of {usable / 1e9:.0f} usable", gigabytes(needs.total), style="bold")
    return table


def excluded(result: PlanResult) -> Table:
    """Everything that does not fit, nearest first."""
    table = narrow_table("does not fit~", "because~")
    for entry in result.excluded:
        table.add_row(entry.what, entry.limit.reason)
    return table


def curve(points: Sequence[ScalingPoint], at: int | None) -> Table:
    """The scaling curve; ``at`` is the index of its knee."""
    table = narrow_table("GPUs>~", "nodes>~", "train as~", "rollout as~", "batch>~", "tokens/s>~", "per GPU>~", "~")
    best = max(p.plan.tokens_s / p.devices for p in points if p.plan is not None)
    for i, point in enumerate(points):
        if point.plan is None:
            table.add_row(
                str(point.devices),
                "-",
                Text(point.why.split(";")[0].rstrip("."), overflow="fold"),
                "",
                "-",
                "-",
                "-",
                "",
            )
            continue
        plan = point.plan
        rollout = point.devices - plan.train.layout.devices
        node = plan.train.layout.devices // plan.nodes
        each = plan.tokens_s / point.devices
        mark = "knee" if i == at else ""
        counts = " ".join(f"{s.replicas}xTP{s.tp}" for s in plan.engines)
        cells = [
            str(point.devices),
            f"{plan.nodes}+{rollout // node}",
            str(plan.train.layout),
            counts,
            short_s(plan.seconds),
            f"{plan.tokens_s:,.0f}",
            f"{each / best:.0%}",
            mark,
        ]
        table.add_row(*cells, style="bold" if i == at else None)
    return table


def classes(asked: PlanRequest, plan: RunPlan) -> str:
    """Replicas per TP class, from large to small."""
    return " ".join(f"{s.replicas}x{_pool(asked, s.pool)}TP{s.tp}" for s in plan.engines)


def _pool(asked: PlanRequest, pool: int) -> str:
    """The device's name as a prefix, where there are several kinds."""
    return f"{asked.pools[pool].device.name}:" if len(asked.pools) > 1 else ""


def short_s(seconds: float) -> str:
    """Seconds with one digit after the point; below one, whole milliseconds, or two significant digits of one."""
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1e3:.2g} ms"


def show_split(made: InitialPlan, *, stderr: bool = False) -> None:
    """Print the compared plans, best first, and the keys of the chosen one; ``stderr``: stdout has another result."""
    (PlainConsole(file=sys.stderr, width=WIDTH, highlight=False) if stderr else console()).print(_screen(made))


def words(made: InitialPlan) -> str:
    """The filled-in keys in one line."""
    return ", ".join(f"{key.removeprefix('components.')} = {value}" for key, value in made.chosen.items())


def _screen(made: InitialPlan) -> RenderableType:
    asked, best = made.asked, made.plan
    what = f"{title(asked)}{steps_from(made.result.sources)}; {asked.trajectories:,} trajectories a batch"
    head = f"split = auto: {what}, lengths: {asked.work.source}"
    switches = f", switches {best.in_turn.switch_s:.1f}" if best.in_turn else ""
    tail = (
        f"chosen: {words(made)}; predicted {best.seconds:.1f} s a batch (train {best.train.time.total:.1f}, rollout"
        f" {best.rollout_s:.1f}{switches})"
    )
    return Group(Text(head), plans(asked, made.result), Text(tail))
