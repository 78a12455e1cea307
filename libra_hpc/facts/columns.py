"""Every number of a run, declared once: name, unit, meaning, and how a screen shows it.

- `COLUMNS` -> keys of ``metrics.jsonl``; whoever measures one puts it into the step's report under this name.
- `LIVE` -> measured about once a second, keys of ``status.json``.
- `COUNTED` -> counted in the events of a run.

``status``, the report and ``docs/columns.md`` are made from these tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import msgspec

from . import series

Lines = Sequence[series.Record]
Value = int | float | None
Over = Callable[[str, Lines, Lines], Value]
"""One value of several steps: (name, lines of the steps, events)."""
Screen = Literal["running", "ended"]
"""The status of a run that goes on; that of an ended one, and the report."""
_FORM = re.compile(r"\{:?(.*?)\}")


class Number(NamedTuple):
    """One number of a run."""

    name: str
    unit: str
    """Empty for a plain count."""
    meaning: str
    on: tuple[Screen, ...] = ()
    """Screens that show it, and whose ``--json`` has it."""
    over: Over | None = None
    text: str = ""
    """``row: words``, ``{}`` is the value; numbers may share a row.  Empty: a screen shows it in its own way."""
    quiet: bool = False
    """Whether it is left out while it is 0."""
    merge: Callable[[Sequence[float]], float] = itemgetter(0)
    """One number of all replicas', the core's first: what travels with the gradients it has of all of them."""

    def shown(self, on: tuple[Screen, ...], over: Over | None = None, text: str = "", *, quiet: bool = False) -> Number:
        """The number with its place on screens."""
        return self._replace(on=on, over=over, text=text, quiet=quiet)


class Cell(NamedTuple):
    """A number in a row of a screen."""

    value: str
    words: str
    """``{}`` is the value."""

    def __str__(self) -> str:
        return self.words.format(self.value)


def mean(name: str, steps: Lines, log: Lines = ()) -> Value:
    return series.known(series.mean(series.column(steps, name)))


def total(name: str, steps: Lines, log: Lines = ()) -> int:
    return int(sum(series.number(row, name, 0.0) for row in steps))


def highest(name: str, steps: Lines, log: Lines = ()) -> int:
    return int(max(filter(math.isfinite, series.column(steps, name)), default=0))


def last(name: str, steps: Lines, log: Lines = ()) -> Value:
    return series.known(series.number(steps[-1], name)) if steps else None


def counted(kind: str, *fields: str) -> Over:
    """Events of one kind, or the sum of their ``fields``."""

    def count(name: str, steps: Lines, log: Lines) -> int:
        found = [event for event in log if event["kind"] == kind]
        return sum(total(field, found) for field in fields) if fields else len(found)

    return count


RUNNING: tuple[Screen, ...] = ("running",)
ENDED: tuple[Screen, ...] = ("ended",)
ALWAYS = (*RUNNING, *ENDED)
VERSIONS = "weight versions"
KEPT_TOKENS = ("generated_tokens", "unfinished_tokens")
"""Fields of ``experience_kept``."""

BATCH = (
    Number("reward", "", "Mean reward of the trajectories").shown(RUNNING, last),
    Number("reward_std", "", "Standard deviation of these rewards"),
    Number("equal_groups", "0..1", "Share of groups, replaced ones too, whose rewards are all equal: no gradient"),
    Number("replaced_groups", "", "Groups of equal rewards that others replaced (`algorithm.refill`)"),
    Number("trajectories", "", "Trajectories of the batch"),
    Number(
        "staleness_mean",
        VERSIONS,
        "Versions between the first token, or KV that it used, and the training, mean over trajectories",
    ).shown(ALWAYS, mean, "staleness: {:.2f} mean"),
    Number("staleness_max", VERSIONS, "The same, the highest").shown(ALWAYS, highest, "staleness: {:.0f} max"),
    Number("gen_tokens", "tokens", "Generated tokens of the batch"),
    Number("experts_mb", "MB", "Experts of the batch's tokens"),
    Number("old_kv_tokens", "tokens", "Of `gen_tokens`: in turns over KV that is older than their weights").shown(
        ALWAYS, total, "staleness: {:,} tokens over kept KV of older weights", quiet=True
    ),
    Number("guest_tokens", "tokens", "Of `gen_tokens`: in turns that engines of guests ended").shown(
        ALWAYS, total, "guests: {:,} tokens generated", quiet=True
    ),
    Number("spot_tokens", "tokens", "Of `guest_tokens`: by jobs of `borrow.spot`").shown(
        ENDED, total, "guests: {:,} of them at spot nodes", quiet=True
    ),
    Number("lent_tokens", "tokens", "Of `guest_tokens`: by the engines of lenders").shown(
        ENDED, total, "guests: {:,} of them at lenders", quiet=True
    ),
    Number("gen_tokens_p50", "tokens", "Generated tokens of a trajectory, median"),
    Number("gen_tokens_p95", "tokens", "The same, 95th percentile"),
    Number("turns_p50", "", "Turns of a trajectory, median"),
    Number("turns_p95", "", "The same, 95th percentile"),
    Number("context_p50", "tokens", "Longest context of a trajectory, median"),
    Number("samples_per_trajectory", "", "Sequences that a trajectory is trained as, mean: 1 where contexts only grow"),
    Number(
        "recomputed_tokens",
        "tokens",
        "Context tokens that engines computed again: after a move, new weights, or an eviction from a KV cache",
    ).shown(ALWAYS, total, "recomputed: {:,} context tokens", quiet=True),
    Number("evicted_tokens", "tokens", "Of `recomputed_tokens`: after an eviction").shown(
        ALWAYS, total, "recomputed: {:,} of them evicted from a KV cache", quiet=True
    ),
    Number("failed", "", "Trajectories left out after repeated failures"),
    Number("retried", "", "Failed attempts that another attempt followed"),
    Number("rollout_s", "s", "Time in which the present engines generate such a batch, replaced groups too"),
)
"""From the rollout leader (`Batch.stats`), beside the means of the task's own numbers."""

STEP = (
    Number("train_nodes", "", "Nodes that trained the step"),
    Number("replicas", "", "Data-parallel replicas on these nodes").shown(RUNNING, last, "replicas: {:.0f} training"),
    Number("generation", "", "Membership generation that trained it").shown(
        RUNNING, last, "replicas: generation {:.0f}"
    ),
    Number("wait_s", "s", "Time the trainer waited for the batch, idle"),
    Number("tokens", "tokens", "Tokens of the batch, prompts included").shown(ENDED, total, "tokens: {:,} trained"),
    Number("step_s", "s", "Time since the commit before"),
    Number("version", "", "Weight version that the step produced"),
)
"""From the train leader."""

TRAINING = (
    Number("loss", "", "Of all replicas, over what `algorithm.aggregate` names"),
    Number("grad_norm", "", "Norm of the gradient before clipping"),
    Number("entropy", "nats", "Mean entropy at the loss tokens"),
    Number("ratio_mean", "", "Mean of pi_theta / pi_behaviour"),
    Number("ratio_truncated", "0..1", "Share of tokens whose importance weight was truncated"),
    Number("clipped", "0..1", "Share of tokens whose ratio pi_theta / pi_proximal was clipped"),
    Number("masked", "0..1", "Share of tokens that `algorithm.mask_tokens` or `mask_sequences` leave out"),
    Number("behaviour_kl", "nats", "Estimate (k3) of the KL divergence of pi_theta from pi_behaviour"),
    Number("reference_kl", "nats", "Estimate (k3) of the KL divergence of pi_theta from the reference policy, if any"),
    Number("kl_clamped", "0..1", "Share of tokens 10 nats below a KL term's q, cut there"),
    Number("logprob_gap", "nats", "Mean of |log pi_theta_old - log pi_behaviour| in the first minibatch"),
    Number("skipped", "", "Minibatches whose update was left out because it was not finite"),
    Number("loss_tokens", "tokens", "Generated tokens trained on", merge=sum).shown(
        ENDED, total, "tokens: {:,} of them generated"
    ),
    Number("trained_tokens", "tokens", "All tokens of the trained samples", merge=sum),
    Number(
        "shared_tokens", "tokens", "Of `trained_tokens`: equal beginnings, computed for one sample alone", merge=sum
    ),
    Number("unrouted_tokens", "tokens", "Of `trained_tokens`: a mixture's without the engines' experts", merge=sum),
    Number("router_agreement", "0..1", "Share of the engines' experts that the routers would choose"),
    # A replica reports it without its wait for the others; the slowest one waits least, for the true reduce time.
    Number(
        "train_s", "s", "Own work of the stage: compute, reduce, update; without waits for slower replicas", merge=max
    ),
    Number("train_ahead_s", "s", "Of `train_s`: beside rollout, before the batch was complete").shown(
        ALWAYS, mean, "train ahead: {:.1f} s a step before its batch was complete", quiet=True
    ),
    Number("train_wall_s", "s", "From the complete batch's dispatch to its commit"),
    Number("reduce_s", "s", "Time in the reduction of gradients", merge=min),
    Number("train_tokens_per_s", "tokens/s", "`tokens` over `train_s`").shown(
        ENDED, mean, "train speed: {:,.0f} tokens/s with contexts"
    ),
)
"""From the train leader, of the replicas' answers; a step that was found committed lacks them."""

OFFERED = (
    Number("changed_share", "0..1", "Share of the weights' elements that changed in the step; 1: all were sent").shown(
        RUNNING, last, "new weights: {:.1%} changed", quiet=True
    ),
    Number("weights_mb", "MB", "Of the pieces that each engine's node gets").shown(
        RUNNING, last, "new weights: {:,.1f} MB", quiet=True
    ),
    Number("weights_dense_mb", "MB", "Of all weights").shown(RUNNING, last),
    Number("diff_s", "s", "To write these pieces, of the slowest training process; not in `train_s`").shown(
        RUNNING, last
    ),
)
"""From the train leader, of the weights of the step before: new ones travel during the next step."""

UPDATED = (
    Number("wire_s", "s", "On the way to a node").shown(RUNNING, last),
    Number("image_s", "s", "To write them into a node's image").shown(RUNNING, last),
    Number("stage_s", "s", "To make them ready beside an engine's steps").shown(RUNNING, last),
    Number("update_s", "s", "From the commit of their step until an engine has them").shown(
        RUNNING, last, "new weights: {:.2f} s to engines", quiet=True
    ),
    Number("pause_s", "s", "Pause of an engine in which it switches to them").shown(
        RUNNING, last, "new weights: pause {:.3f} s", quiet=True
    ),
    Number("dropped_kv_tokens", "tokens", "Of running requests, computed again because of them, in all engines").shown(
        RUNNING, last
    ),
)
"""From rank 0, of the weights that serving engines got during the step, the slowest of each; else they are lacking."""

COORDINATOR = (
    Number("t", "epoch s", "Time at which rank 0 got the commit"),
    Number("step", "", "Optimizer step, from 1"),
    Number("rollout_nodes", "", "Nodes that roll out"),
    Number(
        "rollout_tokens_per_s",
        "tokens/s",
        "Generated tokens per second of the step, or of the last 10 s; else the batch's own",
    ).shown(ENDED, mean, "rollout speed: {:,.0f} generated tokens/s"),
    Number("expected_s", "s", "`step_s` as the planner expected it; null without an estimate of the present split"),
)
"""From rank 0, which writes the line."""

COLUMNS = [*BATCH, *STEP, *TRAINING, *OFFERED, *UPDATED, *COORDINATOR]
"""A task's own number must not take the name of one."""

LIVE = [
    Number("open_trajectories", "", "Trajectories in progress").shown(RUNNING, text="trajectories: {} open"),
    Number("trained_trajectories", "", "Trajectories trained since the ranks started").shown(
        RUNNING, text="trajectories: {:,} trained"
    ),
    Number("resubmitted", "", "Turns submitted again because their engine was lost").shown(
        ALWAYS, counted("resubmitted"), "trajectories: {} re-submitted", quiet=True
    ),
    Number("waiting_turns", "", "Turns that wait for an engine").shown(RUNNING, text="queue: {} turns waiting"),
    Number("waiting_for_room", "", "Of `waiting_turns`: for room in a KV cache").shown(
        RUNNING, text="queue: {} of them for KV cache", quiet=True
    ),
    Number("tools_running", "", "Trajectories in a tool").shown(RUNNING, text="queue: {} tools running"),
    Number("ready_groups", "", "Groups that wait to be trained").shown(RUNNING, text="queue: {} groups ready to train"),
]
"""From the rollout leader's report and from rank 0."""


COUNTED = [
    Number("engines_lost", "", "Engines that ended or hung").shown(ENDED, counted("engine_lost"), "engines: {} lost"),
    Number("pauses", "", "Pauses of admission after failed attempts").shown(
        ENDED, counted("admission_paused"), "admission: pauses {}", quiet=True
    ),
    Number("given_up", "", "Prompts all of whose trajectories failed").shown(
        ENDED, counted("prompt_given_up"), "admission: prompts given up {}", quiet=True
    ),
    Number("kept_trajectories", "", "Finished trajectories that restarts recovered").shown(
        ENDED, counted("experience_kept", "trajectories"), "recovered: {} trajectories", quiet=True
    ),
    Number("kept_unfinished", "", "Unfinished trajectories that restarts recovered by replay of their turns").shown(
        ENDED, counted("experience_kept", "unfinished"), "recovered: {} unfinished ones", quiet=True
    ),
    Number("kept_tokens", "tokens", "Generated tokens of both").shown(
        ENDED, counted("experience_kept", *KEPT_TOKENS), "recovered: {:,} generated tokens", quiet=True
    ),
]
"""Over all attempts of a run."""


def merged(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The numbers of all replicas' reports; what that of the core, the first, lacks is not known."""
    rules = {one.name: one.merge for one in TRAINING}
    return {name: rules[name]([report[name] for report in reports if name in report]) for name in reports[0]}


def declared(screen: Screen) -> list[Number]:
    """The numbers of a screen."""
    return [number for number in (*LIVE, *COLUMNS, *COUNTED) if screen in number.on]


def values_of(
    wanted: Sequence[Number], steps: Lines, log: Lines = (), live: Mapping[str, Any] | None = None
) -> dict[str, Value]:
    """Values by name: those of ``live``, else over the steps and events."""
    known = live or {}
    return {
        one.name: known[one.name] if one.name in known else one.over and one.over(one.name, steps, log)
        for one in wanted
    }


def rows_of(screen: Screen, values: Mapping[str, Value]) -> dict[str, list[Cell]]:
    """The rows of a screen by label; one whose first number is unknown is a dash."""
    found: dict[str, list[Cell]] = {}
    for one in declared(screen):
        value = values.get(one.name)
        if not one.text or (one.quiet and not value):
            continue
        row = found.setdefault(one.text.partition(":")[0], [])
        if not row or (value is not None and row[0].value != "-"):
            row.append(cell(one, value))
    return found


def cell(number: Number, value: Value) -> Cell:
    """A value in the number's form, a dash where there is none."""
    words = number.text.partition(": ")[2]
    form = _FORM.search(words)
    return Cell("-", "{}") if value is None else Cell(format(value, form[1] if form else ""), _FORM.sub("{}", words))


def as_json(record: Any) -> dict[str, Any]:
    """A record as a plain dictionary for JSON, its ``numbers`` beside its other fields."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    shown: dict[str, Value] = fields.pop("numbers")
    return fields | shown
