"""The page of all numbers and events: ``python -m tests.docs.columns_page > docs/columns.md``."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from libra_hpc.facts import columns
from libra_hpc.facts.columns import Number
from libra_hpc.facts.events import EVENTS, EventKind

WIDTH = 100
_PAGE = """\
# What do the columns of metrics.jsonl and the events mean?

```
tail -1 RUN/metrics.jsonl | python -m json.tool      # the last step
grep '"kind":"engine_lost"' RUN/events.jsonl         # events of one kind
```

`metrics.jsonl` has one line per optimizer step, `events.jsonl` one per event. Both only grow, and are readable while
the run goes on.

This page is written by `python -m tests.docs.columns_page`.

## Columns of metrics.jsonl

From the rollout leader, of the step's batch. Means of the task's own numbers stand beside them; `task_` precedes a name
that is taken.

{batch}

From the train leader:

{step}

From the training processes. A step that was found committed in a process that joined has none of them.

{training}

From the processes of the core, of the weights of the step before, which travel during the step:

{offered}

From rank 0, of the weights that serving engines got during the step: the slowest engine's. A step without has none of
them:

{updated}

From rank 0:

{coordinator}

## Other numbers of the screens

In `status.json` and `status --json`, once a second:

{live}

Counted in the events of all attempts:

{counted}

## Kinds of events

Every line has `t` (epoch seconds), `kind` and fields (in parentheses). The report lists kinds marked *fault*; `status`
shows the reason of kinds marked *notice* for two minutes.

{events}
"""


def page() -> str:
    """The text of ``docs/columns.md``."""
    tables = ("BATCH", "STEP", "TRAINING", "OFFERED", "UPDATED", "COORDINATOR", "LIVE", "COUNTED")
    parts = {name.lower(): "\n".join(map(_number, getattr(columns, name))) for name in tables}
    return _PAGE.format(**parts, events="\n".join(map(_event, EVENTS.values())))


def _number(number: Number) -> str:
    unit = f", in {number.unit}" if number.unit else ""
    return _entry(f"`{number.name}`{unit}: {number.meaning}.")


def _event(kind: EventKind) -> str:
    fields = ", ".join(f"`{name}`" for name in kind.fields.split())
    marks = [word for word, marked in (("fault", kind.fault), ("notice", kind.notice)) if marked]
    return _entry(f"`{kind.kind}`{fields and f' ({fields})'}: {kind.meaning}.", marks)


def _entry(text: str, marks: Sequence[str] = ()) -> str:
    shown = f" *{', '.join(marks)}*" if marks else ""
    return textwrap.fill(f"- {text}{shown}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


if __name__ == "__main__":
    print(page(), end="")
