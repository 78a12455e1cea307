"""What tasks say about their work, filled into ``[task.work]`` where the run file leaves it open.

- Rows that the task reads as prompts -> the mean length of their prompts, at `TOKEN_BYTES` bytes a token.
- The task's class has a table `Task.work` -> its keys.
- The task is not there, or cannot be read -> nothing: `check` refuses such a run, and a dry run needs no task.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import msgspec

from libra_hpc.config.learn import AGENT, VERIFIERS, TaskTable
from libra_hpc.config.load import with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.config.work import UNSAID
from libra_hpc.errors import UserError, invalid
from libra_hpc.tasks.data_task import open_rows

from .named_files import class_text

SAMPLED_ROWS = 512
"""Prompts that are measured, evenly spaced. Half: a long one among short ones is missed; double: no other plan."""
TOKEN_BYTES = 4.0
"""UTF-8 bytes of a token, in English, code and Chinese from 3 to 5."""


def known_work(config: RunConfig) -> RunConfig:
    """``config`` with the work of its tasks as far as it is known; raises `UserError` for a class with a bad table."""
    values: dict[str, Any] = {}
    for (field, (_, _, work)), (key, (name, table)) in zip(
        config.task.works.items(), config.task.tables.items(), strict=False
    ):
        found = {**_of_rows(name, table, config.rollout.max_model_len), **_of_class(key, name)}
        said = {one: value for one, value in msgspec.to_builtins(work).items() if value != getattr(UNSAID, one)}
        if found and not work.trace:
            values |= {f"{field}.{one}": value for one, value in {**found, **said}.items()}
    return with_values(config, values) if values else config


def _of_rows(name: str, table: TaskTable, longest: int) -> Mapping[str, Any]:
    """A row that fills half of the context counts as that half."""
    if not table.data or name in (AGENT, VERIFIERS):
        return {}
    try:
        rows = open_rows(table.data)
        chosen = range(0, len(rows), max(1, len(rows) // SAMPLED_ROWS))
        prompts = [rows[number].get(table.prompt or "prompt", "") for number in chosen]
    except UserError:
        return {}
    sizes = [len(msgspec.json.encode(prompt)) / TOKEN_BYTES for prompt in prompts if prompt]
    return {"prompt_tokens": max(1, round(fmean(min(size, longest // 2) for size in sizes)))} if sizes else {}


def _of_class(key: str, name: str) -> Mapping[str, Any]:
    try:
        lines = class_text(key, name).body
    except UserError:
        return {}
    for line in lines:
        if isinstance(line, ast.Assign | ast.AnnAssign) and ast.unparse(line).startswith(("work = ", "work: ")):
            try:
                return dict(ast.literal_eval(line.value or "{}"))
            except (ValueError, TypeError) as error:
                valid = 'numbers by keys of [task.work], such as {"turns": 6}'
                raise invalid(key, name, "`work` of its class is not written out as a table", valid) from error
    return {}
