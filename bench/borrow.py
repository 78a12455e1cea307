"""What borrowed engines bring: seconds a batch without them, with them, and with as many own engines.

- Settings of ROSE (arXiv 2605.06534): 8 own and 16 lent GPUs, Qwen3-8B, TP1, limits of 500 and 150 ms; 16 own and 64
  lent GPUs, Qwen3-32B, TP4, 1,000 and 450 ms.  Groups of 16, contexts of 32K tokens, training of 60 s, eta = 1.
- Lenders: code-like traffic, ROSE's peaks, engines that pause every six seconds, and spot engines that are taken back.
- "of own": the share of the gain that as many own engines would have; "x alone": 1 is no gain.
- "bound": the same of own engines that never pause, as many as the lenders' mean share of the time ("open") leaves.
- "starts": share of the time in which a device is free and its engine has to start (allocation overhead).

    python -m bench.borrow [--seeds 4] [--batches 6] [--policy cmlfq,sticky,affine_first] [--rows NAME|NAME] [--jobs 2]
"""

from __future__ import annotations

import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec

from bench.harness import by_row, interval, options, report, seeds
from bench.policies import POLICIES
from libra_hpc.policies.serving.step_gate import GateLimits
from libra_hpc.simulator.borrowing import Borrowing, borrowing, parse_borrow
from libra_hpc.simulator.engine.simulated_engines import build_engines
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.traces.generate import Dials, generate

SMALL = ("qwen3-8b", "1xTP1", 8, 16, GateLimits(0.5, 0.15))
LARGE = ("qwen3-32b", "1xTP4", 16, 16, GateLimits(1.0, 0.45))
"""Model, engines, own GPUs, engines to borrow, limits."""
WORK = {"r2e": (SMALL, "r2e"), "search": (SMALL, "search"), "r2e 32B": (LARGE, "r2e")}
LENDERS = ("code", "rose", "flap", "spot")
ROWS = {f"{work}, {kind}": (work, kind) for work in WORK for kind in LENDERS} | {"r2e, one batch": ("r2e", "code")}
BATCH, GROUP, MAX_CONTEXT, TRAIN_S = 256, 16, 32_768, 60.0
MEANS = {
    "alone": ".0f",
    "borrowed": ".0f",
    "own": ".0f",
    "open": ".2f",
    "starts": ".2%",
    "tokens": ".2f",
    "leaves": ".0f",
    "ttft_p99_s": ".2f",
}
COLUMNS = ["row", "policy", "x alone", "of own", "bound", "alone s", "borrowed s", "own s", "open", "starts", "tokens"]
COLUMNS += ["leaves", "TTFT"]


def play(job: tuple[str, int, int, list[str]]) -> dict[str, Borrowing]:
    """All policies on one seed."""
    row, seed, batches, policies = job
    name, kind = ROWS[row]
    (model, buckets, gpus, lent, limits), preset = WORK[name]
    one = row.endswith("one batch")
    work = generate(
        preset, Dials(trajectories=BATCH * (1 if one else batches), group=GROUP, seed=seed + 1, max_context=MAX_CONTEXT)
    )
    settings = SimulationSettings(max_model_len=MAX_CONTEXT)
    if not one:
        settings = SimulationSettings(
            max_model_len=MAX_CONTEXT, batch_groups=BATCH // GROUP, eta=1, train_s=TRAIN_S, keep_kv=True
        )
    engines = build_engines(buckets, gpus, "a800", model).engines
    return {
        policy: borrowing(
            work,
            engines,
            parse_borrow(f"{lent}:{kind}"),
            POLICIES[policy],
            settings,
            limits=limits,
            seed=seed,
            bounded=True,
        )
        for policy in policies
    }


def lines(row: str, results: list[dict[str, Borrowing]]) -> list[list[str]]:
    found = []
    for policy in results[0]:
        every = [result[policy] for result in results]
        cells = [f"{statistics.fmean(getattr(one, name) for one in every):{form}}" for name, form in MEANS.items()]
        ratios = [interval([getattr(one, name) for one in every]) for name in ("gain", "of_own", "bound_of_own")]
        found.append([row, policy, *ratios, *cells])
    return found


def main() -> None:
    defaults: dict[str, Any] = {"seeds": 4, "batches": 6, "policy": "cmlfq", "jobs": 2}
    given = options("borrow", __doc__, rows=ROWS, **defaults)
    policies = list(dict.fromkeys(given.policy.split(",")))
    jobs = [(name, seed, given.batches, policies) for name in given.rows for seed in seeds(given)]
    with ProcessPoolExecutor(given.jobs) as pool:
        found = by_row(pool, play, jobs, lambda row: ", ".join(f"{p} {r.gain:.3f}" for p, r in row.items()))
    rows = [line for name, results in found.items() for line in lines(name, results)]
    notes = [f"{given.seeds} seeds, {given.batches} batches of {BATCH} trajectories, A800"]
    report(given, "Borrowed engines", columns=COLUMNS, rows=rows, notes=notes, raw=msgspec.to_builtins(found))


if __name__ == "__main__":
    main()
