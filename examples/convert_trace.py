"""Writes what another project recorded as a trace: lengths for `planner.trace`, `simulate` and dry runs.

    python examples/convert_trace.py AzureLLMInferenceTrace_code.csv azure.jsonl.gz
    python examples/convert_trace.py session.json session.jsonl.gz

A CSV of Azure (github.com/Azure/AzurePublicDataset): every row is a trajectory of one turn.  A JSON document of
kv-cache-tester (github.com/callanjfox/kv-cache-tester): calls are turns, and a shrunken context begins a trajectory.
"""

import csv
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.traces.read import write_trace
from libra_hpc.traces.record import trajectory

MAX_GAP_S = 60.0
"""Seconds between two calls; a longer gap is an absent person, not a tool."""


def of_rows(path: Path) -> Iterator[TrajectoryRecord]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        for number, row in enumerate(csv.DictReader(file)):
            turn = TurnRecord(0, int(row["GeneratedTokens"]))
            yield trajectory(f"{path.stem}/{number}", 0, int(row["ContextTokens"]), [turn])


def of_session(path: Path) -> Iterator[TrajectoryRecord]:
    episodes: list[list[dict[str, Any]]] = []
    # A sub-agent has calls of its own, and a call that failed generated nothing.
    for call in (one for one in json.loads(path.read_text())["requests"] if one.get("out")):
        if not episodes or call["in"] < episodes[-1][-1]["in"]:
            episodes.append([])
        episodes[-1].append(call)
    for number, calls in enumerate(episodes):
        new, gaps = [0], list[float]()
        for before, call in pairwise(calls):
            new.append(max(0, call["in"] - before["in"] - before["out"]))
            gap = call["t"] - before["t"] - (before.get("api_time") or 0.0)
            gaps.append(min(max(gap, 0.0), MAX_GAP_S))
        each = zip(new, calls, [*gaps, 0.0], strict=True)
        turns = [TurnRecord(tokens, call["out"], "tool", tool_s=seconds) for tokens, call, seconds in each]
        yield trajectory(f"{path.stem}/{number}", 0, calls[0]["in"], turns)


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    write_trace(out, of_rows(source) if source.suffix == ".csv" else of_session(source))
