"""Boards and turns for tests of the policies, and the plainest possible driver."""

from __future__ import annotations

import random
from typing import Any

from msgspec.structs import replace

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.protocol import Finished, Policy, TurnView
from libra_hpc.protocol.engine_state import EngineStats
from libra_hpc.protocol.env import Signal

OK, ERROR, MISS = (Signal("run", outcome, 50, 1.0) for outcome in ("ok", "error", "miss"))


def board_of(*engines: tuple[str, int], cap: int = 4, kv: int = 100_000) -> Board:
    """A board of idle engines (name, TP)."""
    board = Board(cap)
    for name, tp in engines:
        board.up(name, tp, kv, 0)
    return board


def board(*engines: tuple[str, int], cap: int = 64, kv: int = 100_000) -> Board:
    """A board whose engines have room for many turns."""
    return board_of(*engines, cap=cap, kv=kv)


def set_cap(board: Board, engine: str, cap: int) -> None:
    """Change the most turns in flight at one engine."""
    view = board.engines[engine]
    board.free -= view.free
    view.cap = cap
    board.free += view.free


def turn_of(
    name: str,
    prompt: str = "p",
    *,
    at: str = "",
    turns: int = 0,
    context: int = 500,
    attained: int = 0,
    ready: float = 0.0,
    signals: tuple[Signal, ...] = (),
    sample: int = 0,
    limit: int = 0,
) -> TurnView:
    """A turn of trajectory ``name``."""
    return TurnView(
        trajectory=name,
        prompt_id=prompt,
        sample=sample,
        task="task",
        context_tokens=context,
        attained_tokens=attained,
        turns=turns,
        ready_at=ready,
        engine=at,
        signals=signals,
        max_context=limit,
    )


def turn(name: str = "t", prompt: str = "p", **options: Any) -> TurnView:
    """A turn of a sample that is not the probe of its prompt."""
    return turn_of(name, prompt, **{"sample": 1, **options})


def ended(name: str, prompt: str, total: int, **options: Any) -> Finished:
    """A completed trajectory; ``at``: generated tokens when each of its ``signals`` arrived."""
    signals, at = options.pop("signals", ()), options.pop("at", ())
    fields = {"task": "task", "sample": 0, "version": 0, "signals": signals, "at_signal": at, **options}
    return Finished(trajectory=name, prompt_id=prompt, generated_tokens=total, turns=len(signals) + 1, **fields)


def finished(total: int, prompt: str = "p", name: str = "done", **options: Any) -> Finished:
    """The same, where its length matters most."""
    return ended(name, prompt, total, **options)


def stats(steps: int = 0, busy: float = 0.0, *, kv: float = 0.1, prefill: int = 0, **counts: int) -> EngineStats:
    """Counters of an engine."""
    counters = {"generated_tokens": steps, "prefill_tokens": prefill, "steps": steps, "busy_s": busy, "kv_use": kv}
    return replace(EngineStats(), running=1, **counters, **counts)


def drive(policy: Policy, board: Board, seed: int, lost: float = 0.0) -> None:
    """Serve up to 40 trajectories: they arrive at random, turns end in random order, tools take a moment, engines
    close, open and change cap meanwhile, and with a chance of ``lost`` a round one is replaced.

    Asserts at each decision what every policy owes: an open engine with a free slot, a level that is the engine's, and
    a reason; and in the end that all were served once.
    """
    rng = random.Random(seed)
    lengths = {
        f"g{g}/{s}": [rng.randint(1, 3000) for _ in range(rng.randint(1, 5))]
        for g in range(rng.randint(1, 10))
        for s in range(4)
    }
    """Generated tokens per turn of each trajectory; the name is ``prompt/sample``."""
    dispatcher = Dispatcher(policy, board)
    arrivals = sorted((rng.uniform(0.0, 50.0), name) for name in lengths)
    done = dict.fromkeys(lengths, 0)
    running: list[tuple[str, str, int]] = []
    signals: dict[str, tuple[Signal, ...]] = dict.fromkeys(lengths, ())
    now, order, idle = 0.0, list[str](), 0

    def ready(name: str, at: str) -> None:
        turns, attained = done[name], sum(lengths[name][: done[name]])
        seen = {"at": at, "turns": turns, "attained": attained, "ready": now, "signals": signals[name]}
        dispatcher.ready(turn_of(name, name.split("/")[0], context=500 + attained + 50 * turns, **seen), now)

    while len(order) < len(lengths):
        while arrivals and (arrivals[0][0] <= now or not (running or len(dispatcher))):
            arrival, name = arrivals.pop(0)
            now = max(now, arrival)
            ready(name, "")
        before = {e.engine: (e.open, e.inflight, e.cap) for e in board.engines.values()}
        for turn, decision in dispatcher.dispatch(now):
            is_open, inflight, cap = before[decision.engine]
            assert is_open
            assert inflight < cap
            before[decision.engine] = (is_open, inflight + 1, cap)
            assert decision.level == board.engines[decision.engine].level
            assert decision.reason
            running.append((turn.trajectory, decision.engine, turn.context_tokens))
        # Nothing runs: time passes until patience, a closed engine or an arrival ends; for ever would be starvation.
        idle = 0 if running else idle + 1
        assert idle < 200, "turns wait although nothing runs"
        now += rng.expovariate(1.0)
        if rng.random() < 0.1:
            engine = rng.choice(list(board.engines))
            board.set_open(engine, not board.engines[engine].open)
            set_cap(board, engine, rng.randint(1, 5))
        if rng.random() < lost:
            gone = board.engines[rng.choice(list(board.engines))]
            board.down(gone.engine)
            board.up(gone.engine, rng.choice((1, 2, 4)), gone.kv_capacity, 0)
            for name in [name for name, engine, _ in running if engine == gone.engine]:
                ready(name, gone.engine)
            running = [run for run in running if run[1] != gone.engine]
        if running:
            name, engine, context = running.pop(rng.randrange(len(running)))
            board.answered(engine, context)
            done[name] += 1
            if done[name] == len(lengths[name]):
                order.append(name)
                ends = tuple(sum(lengths[name][: i + 1]) for i in range(len(signals[name])))
                record = ended(name, name.split("/")[0], sum(lengths[name]), signals=signals[name], at=ends)
                dispatcher.finished(record, now)
            else:
                signals[name] += (rng.choice((OK, ERROR)),)
                ready(name, engine)
    assert board.free == sum(e.free for e in board.engines.values())
    assert len(dispatcher) == 0
    assert sorted(order) == sorted(lengths)


def assert_nothing_is_kept(policy: object) -> None:
    """Every trajectory ended: the policy or rule of admission holds nothing of any."""
    per_trajectory = ["_prompt", "_level", "_scouts", "_probes", "_programs", "_placed", "_waits", "_live"]
    per_trajectory += ["_lives", "_tokens", "_open", "_age", "_at", "_running", "_cached"]
    held = {key: value for key, value in vars(policy).items() if key in per_trajectory}
    assert all(len(value) == 0 for value in held.values()), held
