"""Why a run failed, where its result names a symptom only: the last telling line of the attempt's logs.

- The sentence names a log file -> that file.
- Else -> Slurm's own output, then the logs of the launcher and of the agents.
- Of several kinds of lines the first of `TELLING` counts, of several lines of a kind the last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

TAIL_BYTES = 64 * 1024
"""Read from the end of each log.  A traceback takes a few kB; 100 logs of this size are read within a second."""
SET_UP_ENDED = "the set-up of the job ended at"
"""First words of what the batch script prints when its set-up lines fail."""
OWNER_ENDS = "this owner of the run ends: "
"""First words of an owner that has lost its run, and may not write a result."""
LONGEST = 200
"""Most characters of a line that are shown."""
SYMPTOM = re.compile(
    r"^$|; see |\bsee the agents' logs|did not meet|exit code|job script failed|a node failed|was lost|ended with \d"
    r"|without a result|ended \d+ times|killed by signal|no sign of life|out of memory$"
)
"""Sentences that name no cause."""
NAMED = re.compile(r"\bsee (/\S+\.log)\b")
OUTPUTS = ("slurm.out", "launcher.log", "agent-*.log")
_OWN = re.compile(r"^(?:the run (?:was )?\w+:|libra-hpc:|repeat:|restart:|requeue:|exit codes by rank:)")
"""Lines of the launcher that repeat the result."""
VALIDATION = re.compile(r" \[type=\w+, input_value=.*$")
"""End of a sentence of pydantic, which vLLM uses: it stands between the name of the exception and an address."""
TELLING = (
    re.compile(rf"^(?:{SET_UP_ENDED} |{OWNER_ENDS})"),
    re.compile(r"^(?:slurmstepd|srun|slurmd)[^:]*: error: .*(?:oom[-_ ]?kill|out of memory)", re.IGNORECASE),
    VALIDATION,
    re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Refused|Unreachable)(?:: .*)?$"),
    re.compile(
        r"No module named|command not found|No such file or directory|Permission denied|No space left on device"
    ),
    # An agent whose coordinator is gone notes an effect.
    re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) [\w.]+: (?!the coordinator)"),
    re.compile(r"DUE TO NODE FAILURE|DUE TO TIME LIMIT|^srun: error: Node failure on "),
    re.compile(r"^(?:slurmstepd|srun|slurmd)[^:]*: error: (?!.*(?:Exited with exit code|Terminat|aborted|CANCELLED))"),
    re.compile(r"^(?:bash|/\S+): .*error|^(?:Segmentation fault|Bus error|Illegal instruction)", re.IGNORECASE),
)
"""Lines that name a cause, the most certain kind first."""
_PREFIX = re.compile(r"^(?:(?:slurmstepd|srun|slurmd)[^:]*: error: |\S+ \S+ (?:ERROR|CRITICAL) [\w.]+: )")


def with_cause(sentence: str, logs: Path) -> str:
    """``sentence``, and the cause from ``logs`` where it has none; unchanged where the logs have none either."""
    if not SYMPTOM.search(sentence):
        return sentence
    named = NAMED.search(sentence)
    paths = [Path(named[1])] if named else [path for name in OUTPUTS for path in sorted(logs.glob(name))]
    found = telling_line([(path.stem, tail(path)) for path in paths])
    # One that the sentence has already adds nothing.
    if not found or found.partition(": ")[2] in sentence:
        return sentence
    return f"{sentence.rstrip('.')}; {found}" if sentence else found


def telling_line(logs: Sequence[tuple[str, Sequence[str]]]) -> str:
    """``name: line`` of the most telling line of logs, given as name and lines; empty without one."""
    for kind in TELLING:
        for name, lines in logs:
            for line in reversed(lines):
                text = line.strip()
                if kind.search(text) and not _OWN.search(text):
                    return f"{name}: {_short(VALIDATION.sub('', _PREFIX.sub('', text)))}"
    return ""


def tail(path: Path, since: int = 0) -> list[str]:
    """The last lines of a file, from byte ``since``; none when it cannot be read."""
    try:
        with path.open("rb") as handle:
            handle.seek(0, 2)
            handle.seek(max(since, handle.tell() - TAIL_BYTES))
            return handle.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
