"""What rollouts cost the users of the same device: a serving engine, a rollout engine, and who may step when.

    python -m bench.lend [--rows "code 20%|conversation 60%"] [--seeds 4] [--seconds 10]

* Two real vLLM engines (2 layers of 128) in one process on one thread. Each step is executed, its CPU seconds of
  the thread advance the clock, and arrivals follow that clock: other load on the machine moves it little.
* *no gate*: overlapping steps share the device. *static share*: a third of it is the rollouts', always. Gated steps
  exclude each other: a begun one is waited for. *priority*: one engine, users first by vLLM's priority.
* Every way gets the same requests; *alone* is played twice, which shows the spread. Rollouts never run out.
* Each result is written as it is there: a run that is cut off keeps them.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from array import array
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from bench.harness import Options, options, progress, report, seeds
from bench.lend_traffic import LENGTHS, UserRequest, traffic
from bench.simulated_vs_real import model
from libra_hpc.engine.settings import EngineConfig, alone, prepare_process
from libra_hpc.policies.serving.serving_view import ServingView
from libra_hpc.policies.serving.step_gate import GateLimits, StepGate
from libra_hpc.protocol.engine import Generate

if TYPE_CHECKING:
    from libra_hpc.engine.core import RolloutEngine
    from libra_hpc.engine.steplog import BatchWatch

ROWS = ("code 5%", "code 20%", "code 40%", "conversation 20%", "conversation 60%")
"""Traffic, and how much of the time it keeps the server alone busy."""
WAYS = ("alone", "alone again", "no gate", "priority", "static share", "idle")
LAYERS, HIDDEN = 2, 128
"""A small model, so that seconds of traffic are many requests."""
SHARE = 1 / 3
IN_FLIGHT, PROMPT, GENERATED = 12, (800, 3000), 64
"""Rollouts; range of their prompts and length of their turns, tokens."""
VOCAB = 128
POLL_S = 0.001
PER_USER = ("ttft", "tpot")


class User:
    """A request and when its tokens came."""

    def __init__(self, request: UserRequest) -> None:
        self.request, self.count = request, 0
        self.first = self.last = inf


class Timed:
    """A real engine; its steps take CPU seconds of this thread."""

    def __init__(self, config: EngineConfig) -> None:
        from libra_hpc.engine.core import RolloutEngine
        from libra_hpc.engine.steplog import BatchWatch

        self.engine: RolloutEngine = RolloutEngine(config)
        self.scheduler = self.engine._scheduler
        self.batches: BatchWatch = BatchWatch(self.scheduler)
        self.most = self.scheduler.max_num_scheduled_tokens
        self._known: dict[str, int] = {}

    def add(self, rid: str, prompt: int, output: int, rng: random.Random, priority: int = 0) -> None:
        ids = array("i", (rng.randrange(VOCAB) for _ in range(prompt)))
        refused = self.engine.submit(Generate(rid, ids.tobytes(), output, priority=priority))
        assert refused is None, refused
        self._known[rid] = 0

    def step(self) -> tuple[float, dict[str, int]]:
        """Seconds, and new tokens of each request."""
        began = time.thread_time()
        done = self.engine.step()
        seconds = time.thread_time() - began
        counts = {turn.rid: len(turn.tokens) for turn in self.engine._turns.values()}
        counts |= {one.rid: len(one.tokens) // 4 for one in done}
        new = {rid: count - self._known[rid] for rid, count in counts.items() if count > self._known[rid]}
        self._known |= counts
        for one in done:
            del self._known[one.rid]
        return seconds, new

    def clear(self) -> None:
        """Forget all requests and caches."""
        for rid in list(self._known):
            self.engine.abort(rid)
        while self.scheduler.has_requests():
            self.engine.step()
        self._known.clear()
        self.engine._client.reset_prefix_cache()
        self.scheduler.max_num_scheduled_tokens = self.most


class Play:
    """One way of sharing the device, over one list of requests."""

    def __init__(
        self, way: str, requests: Sequence[UserRequest], server: Timed, rollout: Timed, limits: GateLimits
    ) -> None:
        self.way, self.server, self.rollout = way, server, server if way == "priority" else rollout
        self.users = {f"u{number}": User(one) for number, one in enumerate(requests)}
        self.present: dict[str, User] = {}
        self.gate = StepGate(limits) if way == "idle" else None
        self.rollouts = not way.startswith("alone")
        self.rng = random.Random(1)
        self.now, self.number, self.busy_s, self.tokens = 0.0, 0, 0.0, 0
        self.longest = 0.0
        self.active: dict[Timed, tuple[float, float, dict[str, int]]] = {}
        """Engine -> seconds left of its step, seconds of the step, tokens at its end."""
        self.server_next = True

    def run(self, seconds: float) -> dict[str, Any]:
        arrivals = list(self.users.items())[::-1]
        while arrivals or self.present or (self.rollouts and self.now < seconds):
            while arrivals and arrivals[-1][1].request.arrival <= self.now:
                rid, user = arrivals.pop()
                self.present[rid] = user
                self.server.add(rid, user.request.prompt, user.request.output, self.rng, priority=-1)
            self._begin()
            arrival = arrivals[-1][1].request.arrival if arrivals else inf
            if not self.active:
                self.now = min(arrival, self.now + POLL_S) if self.rollouts else arrival
                continue
            engine = min(self.active, key=lambda one: self.active[one][0] / self._speed(one))
            ends = self.active[engine][0] / self._speed(engine)
            passed = min(ends, arrival - self.now)
            for one, (left, seconds, new) in self.active.items():
                self.active[one] = left - passed * self._speed(one), seconds, new
            self.now += passed
            if passed == ends:
                self._end(engine)
        return self._figures(max(seconds, self.now))

    def _speed(self, engine: Timed) -> float:
        if self.way == "static share":
            return SHARE if engine is self.rollout else 1 - SHARE
        return 1 / len(self.active)

    def _begin(self) -> None:
        order = [self.server, self.rollout] if self.server_next else [self.rollout, self.server]
        for engine in dict.fromkeys(order):
            if engine in self.active or (self.gate and self.active):
                continue
            if engine is self.rollout:
                if not self.rollouts:
                    continue
                if self.gate and not self._allowed(self.gate):
                    continue
                self._refill()
            elif not self.present:
                continue
            seconds, new = engine.step()
            self.active[engine] = seconds, seconds, new

    def _refill(self) -> None:
        ours = sum(rid.startswith("r") for rid in self.rollout._known)
        for _ in range(IN_FLIGHT - ours):
            self.number += 1
            self.rollout.add(f"r{self.number}", self.rng.randint(*PROMPT), GENERATED, self.rng)

    def _allowed(self, gate: StepGate) -> bool:
        self._refill()
        view = ServingView(written=self.now, served=len(self.present))
        tokens = gate.decide(view, self.rollout.batches.upcoming(), self.now).tokens
        self.rollout.scheduler.max_num_scheduled_tokens = min(self.rollout.most, tokens) or self.rollout.most
        return tokens > 0

    def _end(self, engine: Timed) -> None:
        _, seconds, new = self.active.pop(engine)
        batch = engine.batches.take()
        if engine is self.rollout:
            self.longest = max(self.longest, seconds)
            self.tokens += batch.prefill + batch.decodes
            if self.gate:
                self.gate.stepped(batch, seconds, self.now)
        if engine is self.server:
            self.busy_s += seconds
        self.server_next = engine is not self.server
        for rid, count in new.items():
            user = self.present.get(rid)
            if user is None:
                continue
            user.count += count
            user.first, user.last = min(user.first, self.now), self.now
            if user.count >= user.request.output:
                del self.present[rid]

    def _figures(self, seconds: float) -> dict[str, Any]:
        if self.way == "priority":
            self.tokens -= sum(user.request.prompt + user.count - 1 for user in self.users.values())
        self.server.clear()
        self.rollout.clear()
        many = [user for user in self.users.values() if user.count > 1]
        return {
            "ttft": [user.first - user.request.arrival for user in self.users.values()],
            "tpot": [(user.last - user.first) / (user.count - 1) for user in many],
            "busy": self.busy_s / seconds,
            "rollout_rate": self.tokens / seconds,
            "longest": self.longest,
            "seconds": seconds,
        }


def calibrate(server: Timed, kind: str) -> float:
    """CPU seconds of a request of this kind, mean of some that are served one after the other."""
    rng, total, count = random.Random(kind), 0.0, 16
    for number in range(count):
        server.add(f"c{number}", *LENGTHS[kind].draw(rng), rng)
        while server.engine.busy:
            total += server.step()[0]
    return total / count


def measure(given: Options) -> list[dict[str, Any]]:
    """Every way of every row and seed; a line is written after each."""
    found: list[dict[str, Any]] = []
    limits = GateLimits(given.ttft_ms / 1000)
    config = alone(str(model(LAYERS, HIDDEN)), "cpu", dtype="float32", rollout={"kv_cache_mb": 512})
    prepare_process(config)
    server, rollout = Timed(config), Timed(config)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    lines = given.json.with_suffix(".lines")
    lines.unlink(missing_ok=True)
    costs = {kind: min(calibrate(server, kind) for _ in range(2)) for kind in LENGTHS}
    progress("CPU milliseconds of a request: " + ", ".join(f"{k} {1000 * v:.0f}" for k, v in costs.items()))
    for seed in seeds(given):
        for row in given.rows:
            kind, _, duty = row.partition(" ")
            requests = traffic(kind, seed, given.seconds, float(duty[:-1]) / 100, costs[kind])
            # In another order with every other seed, so that drift of the machine's speed cancels.
            for way in WAYS[::-1] if seed % 2 else WAYS:
                played = Play(way, requests, server, rollout, limits).run(given.seconds)
                found.append({"row": row, "seed": seed, "way": way, **played})
                with lines.open("a") as file:
                    file.write(json.dumps(found[-1]) + "\n")
                ttft, most = 1000 * high(played["ttft"]), 1000 * played["longest"]
                rate, busy = played["rollout_rate"], played["busy"]
                progress(
                    f"{row}, seed {seed}, {way}: {len(requests)} users, P99 TTFT {ttft:.0f} ms, "
                    f"{rate:,.0f} rollout tokens/s, longest rollout step {most:.0f} ms, serving {busy:.0%}"
                )
    return found


def high(values: Sequence[float]) -> float:
    """The 99 % quantile, between the nearest two."""
    ordered = sorted(values)
    place = 0.99 * (len(ordered) - 1)
    low = int(place)
    above = ordered[min(low + 1, len(ordered) - 1)]
    return ordered[low] + (place - low) * (above - ordered[low])


def table(given: Options, found: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """A line for each row and way, over the requests of all its seeds."""
    out: list[list[Any]] = []
    for row in dict.fromkeys(one["row"] for one in found):
        ways = {way: [one for one in found if (one["row"], one["way"]) == (row, way)] for way in WAYS}
        pooled = {
            name: high([value for way in WAYS[:2] for one in ways[way] for value in one[name]]) for name in PER_USER
        }
        ungated = statistics.fmean(one["rollout_rate"] for one in ways["no gate"]) if ways["no gate"] else 0.0
        for way, ones in ways.items():
            if not ones:
                continue
            values = {name: [value for one in ones for value in one[name]] for name in PER_USER}
            over = [
                sum(value > limit / 1000 for value in values[name]) / len(values[name])
                for name, limit in zip(PER_USER, (given.ttft_ms, given.tpot_ms), strict=True)
            ]
            rate = statistics.fmean(one["rollout_rate"] for one in ones)
            out.append(
                [
                    row,
                    way,
                    "-" if way == "priority" else f"{statistics.fmean(one['busy'] for one in ones):.0%}",
                    f"{1000 * high(values['ttft']):.0f}",
                    *(f"{high(values[name]) / pooled[name]:.2f}" for name in PER_USER),
                    *(f"{share:.1%}" for share in over),
                    f"{rate / ungated:.2f}" if rate and ungated else "-",
                    f"{1000 * max(one['longest'] for one in ones):.0f}" if rate else "-",
                ]
            )
    return out


COLUMNS = ("traffic", "way", "busy", "TTFT", "x", "TPOT x", "over TTFT", "over TPOT", "rollout", "step")


def main() -> None:
    given = options("lend", __doc__, rows=ROWS, seeds=1, first_seed=0, seconds=10.0, ttft_ms=250.0, tpot_ms=40.0)
    found = measure(given)
    notes = [
        f"{given.seconds:.0f} s of traffic, seeds: {len(seeds(given))}.",
        f"Limits: {given.ttft_ms:.0f} ms for the first token, {given.tpot_ms:.0f} ms for each further one.",
        "TTFT: P99 in ms; x: P99 over that of both plays alone; over: share of the requests over a limit;",
        "rollout: tokens over those without a gate; step: longest of the rollouts in ms.",
    ]
    report(given, "Users beside rollouts", columns=COLUMNS, rows=table(given, found), notes=notes, raw=found)


if __name__ == "__main__":
    main()
