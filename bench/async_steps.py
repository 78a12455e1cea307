"""What asynchronous steps hide: seconds of a decode step by seconds of host work, with steps that wait and with others.

    python -m bench.async_steps [--tp 2] [--host_ms 0,5,20] [--repeat 3]

- A real vLLM engine of random weights, in the process that tests use (`tests.engine.ahead_on_cpu`): a CPU build has no
  asynchronous steps of its own.  Each batch sleeps for the host's work before it is formed.
- With TP 2 vLLM's workers are processes, which compute while the next batch is formed, as a GPU does.  With TP 1 the
  step runs in the thread that forms it, and nothing can be hidden.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import median, options, progress, report
from tests.engine import ahead_on_cpu
from tests.engine.engine_harness import EngineUnderTest, Model, engine_config, make_model, turn

SEQUENCES, TOKENS = 16, 120


class Engine(EngineUnderTest):
    def command(self) -> list[str]:
        return [sys.executable, "-m", ahead_on_cpu.__name__, *super().command()[3:]]


def step_s(model: Model, folder: Path, *, tp: int, host_s: float, ahead: bool, repeat: int) -> float:
    """Seconds of a step in which all sequences decode."""
    os.environ[ahead_on_cpu.HOST] = str(host_s)
    engine = Engine(folder, engine_config(model, tp=tp, async_steps=ahead))
    try:
        engine.ready()
        found = []
        for number in range(repeat):
            begin = time.monotonic()
            engine.generate(*(turn(f"{number}.{i}", [3 + i, 5, 7], TOKENS) for i in range(SEQUENCES)))
            found.append((time.monotonic() - begin) / TOKENS)
        return median(found)
    finally:
        engine.close()


def main() -> None:
    defaults: dict[str, Any] = {"tp": 2, "host_ms": [0, 5, 20], "repeat": 3}
    given = options("async_steps", __doc__, **defaults)
    rows = []
    with tempfile.TemporaryDirectory(prefix="libra-async-") as name:
        model = make_model(Path(name) / "model", seed=1, hidden=512)
        for host_ms in given.host_ms:
            waits, ahead = (
                1e3
                * step_s(
                    model,
                    Path(name) / f"{host_ms}.{mode}",
                    tp=given.tp,
                    host_s=host_ms / 1e3,
                    ahead=mode,
                    repeat=given.repeat,
                )
                for mode in (False, True)
            )
            progress(f"host {host_ms} ms: {waits:.1f} and {ahead:.1f} ms a step")
            rows.append([f"{host_ms} ms", waits, ahead, ahead / waits])
    columns = ["host work per step", "each step waits, ms", "asynchronous, ms", "ratio"]
    notes = [f"TP {given.tp}, {SEQUENCES} sequences of {TOKENS} tokens, medians of {given.repeat}."]
    report(given, "A decode step with host work", columns=columns, rows=rows, notes=notes, raw=rows)


if __name__ == "__main__":
    main()
