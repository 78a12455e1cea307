"""A task of your own without a class: rows of a file, and a function that scores what the policy wrote.

    [task]
    data = "examples/my_data.jsonl"
    prompt = "problem"                       # the column; text, or a list of messages
    reward = "examples/my_reward.py:score"

Try it: libra-hpc task try run.toml --script turns.txt
"""

from __future__ import annotations

import re
from typing import Any


def score(row: dict[str, Any], text: str) -> dict[str, float]:
    """Every part is a column of `metrics.jsonl`; the reward is their sum."""
    numbers = re.findall(r"-?\d+", text)
    return {"correct": float(numbers[-1:] == [row["answer"]]), "brief": 0.1 * (len(text) < 400)}
