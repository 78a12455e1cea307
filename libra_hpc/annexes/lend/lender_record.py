"""What an owner gives and when, checked, and the record of his lender: a file that all who look for lenders read.

- Hours of the day such as ``20-08`` are in the local time of the lender's machine.
- `~/.config/libra-hpc/lenders/NAME.json`, mode 0600, replaced as a whole; ``LIBRA_HPC_LENDERS`` names another folder.
- Its lender renews it every `RENEW_S` and removes it at its end; of one that was killed, the next lender there does.
- Not renewed for `GONE_S`, by the clock of the file system alone, or its process has ended here -> it is gone.
- `NAME.out`: what its last guest printed.
- `NAME.revoked` beside it -> the lender gives nothing until that file is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from libra_hpc.config.site import OWN
from libra_hpc.errors import invalid
from libra_hpc.files import OWNER_ONLY, write_atomic
from libra_hpc.process.lease import boot, start_ticks
from libra_hpc.protocol.joining import GONE_S

_FORM = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?")
VALID = "hours from and to, such as 20-08 or 19:30-07:00"
HOUR, DAY = 60, 24 * 60
"""Minutes."""


class Hours(NamedTuple):
    """Minutes of the day; ``end`` <= ``start``: over midnight.  The default is the whole day."""

    start: int = 0
    end: int = DAY

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Parse ``20-08`` or ``19:30-07:00``; empty: the whole day.  Raises `UserError`."""
        if not text:
            return cls()
        found = _FORM.fullmatch(text)
        if found is None:
            raise invalid("--hours", text, "malformed", VALID)
        numbers = [int(part or 0) for part in found.groups()]
        start, end = numbers[0] * HOUR + numbers[1], numbers[2] * HOUR + numbers[3]
        if max(start, end) > DAY or max(numbers[1], numbers[3]) >= HOUR:
            raise invalid("--hours", text, "no such time of day", VALID)
        if start % DAY == end % DAY and (start, end) != (0, DAY):
            raise invalid("--hours", text, "they begin and end at the same time", VALID)
        return cls(start % DAY, end)

    def has(self, minute: int) -> bool:
        """Whether a minute of the day is in them."""
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def __str__(self) -> str:
        if self == Hours():
            return "always"
        return "-".join(f"{at // HOUR:02}" + (f":{at % HOUR:02}" if at % HOUR else "") for at in self)


SECONDS = {"ms": 1e-3, "s": 1.0}
MIB = {"MiB": 1, "GiB": 1024, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20}
SLO_VALID = "ttft=TIME with ms or s, such as ttft=500ms"
MEMORY_VALID = "a size with MiB or GiB, such as 30GiB"


def first_token_s(text: str) -> float:
    """Seconds of ``ttft=500ms``, which a user may wait for the first token; raises `UserError`."""
    if "tpot" in text:
        raise invalid("--slo", text, "nothing follows tpot: a guest steps only while nobody is served", SLO_VALID)
    match = re.fullmatch(r"ttft=(\d+\.?\d*)(ms|s)", text.strip())
    if match is None or not float(match[1]):
        raise invalid("--slo", text, "malformed" if text else "not given", SLO_VALID)
    return float(match[1]) * SECONDS[match[2]]


def memory_mib(text: str) -> int:
    """MiB of ``30GiB``; empty: 0.  Raises `UserError`."""
    match = re.fullmatch(r"(\d+\.?\d*) ?([a-zA-Z]*)", text) if text else None
    if text and (match is None or match[2] not in MIB or float(match[1]) <= 0):
        raise invalid("--memory", text, "no unit" if match and not match[2] else "malformed", MEMORY_VALID)
    return int(float(match[1]) * MIB[match[2]]) if match else 0


class LendTerms(msgspec.Struct, frozen=True):
    """What one lender gives, and when."""

    ttft_s: float
    """See `GateConfig.ttft_s`."""
    hours: str = ""
    """Text for `libra_hpc.annexes.lend.lender_record.Hours.parse`."""
    memory_mib: int = 0
    """Memory of each GPU for the guest in MiB; 0: as the run has it."""
    tp: int = 0
    """GPUs of an engine; 0: as the run has it."""
    engines: int = 1
    weights_mb_s: float = 0.0
    """Most bandwidth (MB/s) for new weights; 0: no limit."""


VARIABLE = "LIBRA_HPC_LENDERS"
RENEW_S = 5.0
"""Half: twice the writes to a shared file system; double: a lost lender is listed for longer."""
State = Literal["starting", "free", "lends", "paused", "leaving"]
"""``starting``: its server is not up; ``free``: no run takes it; ``leaving``: its guest ends, or frees its memory."""


class LenderRecord(msgspec.Struct, frozen=True):
    name: str
    host: str
    boot: str
    """Identity of that host's running kernel (`libra_hpc.process.lease.boot`)."""
    pid: int
    """Process id of the lender."""
    ticks: int
    """Kernel start time of that process."""
    job: str
    """Slurm job of the server; empty without one."""
    terms: LendTerms
    state: State = "starting"
    why: str = ""
    """Reason of a state that gives nothing."""
    borrower: str = ""
    """Folder of the run that has it."""
    since: float = 0.0
    """Epoch seconds of the state, by the clock of that host."""
    tokens: int = 0
    """Generated for all runs so far."""
    lent_s: float = 0.0
    """Seconds in which it had a guest that was awake."""
    revoked: int = 0
    """Times that its owner took it back from a guest."""
    offers: tuple[str, ...] = ()
    """Folders of the runs that it is offered to, or that have it."""
    alone_ms: float = 0.0
    """See `ServingView.alone_s`."""
    beside_ms: float = 0.0


_decoder = msgspec.json.Decoder(LenderRecord)


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of all records of this user."""
    named = environ.get(VARIABLE, "")
    return Path(named).expanduser() if named else OWN.expanduser().parent / "lenders"


def record_file(place: Path, name: str) -> Path:
    return place / f"{name}.json"


def revoked_file(place: Path, name: str) -> Path:
    return place / f"{name}.revoked"


def log_file(place: Path, name: str) -> Path:
    """What the lender's last guest printed."""
    return place / f"{name}.out"


def write_record(place: Path, record: LenderRecord) -> None:
    """Write the record of a lender; raises `OSError`."""
    write_atomic(record_file(place, record.name), msgspec.json.encode(record), OWNER_ONLY)


def remove_record(place: Path, name: str) -> None:
    for path in (record_file(place, name), revoked_file(place, name), log_file(place, name)):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def remove_ended(place: Path) -> None:
    """Remove what lenders left that were killed on this machine."""
    for name, (record, _) in all_records(place).items():
        if record is not None and _ended(record):
            remove_record(place, name)


def own_identity() -> tuple[str, int, int]:
    """`LenderRecord.boot`, ``pid`` and ``ticks`` of this process."""
    return boot(), os.getpid(), start_ticks(os.getpid()) or 0


def all_records(place: Path) -> dict[str, tuple[LenderRecord | None, bool]]:
    """By name: the record, None where it is torn, and whether its lender is gone."""
    try:
        names = sorted(path.stem for path in place.glob("*.json") if not path.name.startswith("."))
    except OSError:
        return {}
    now, found = _now(place), dict[str, tuple[LenderRecord | None, bool]]()
    for name in names:
        path = record_file(place, name)
        try:
            data, age_s = path.read_bytes(), now - path.stat().st_mtime
        except OSError:
            continue
        record = None
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            record = _decoder.decode(data)
        found[name] = record, age_s > GONE_S or (record is not None and _ended(record))
    return found


def _now(place: Path) -> float:
    """Epoch seconds of the file system, which dates the records: clocks of other machines may differ."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0  # nothing is known to be gone


def _ended(record: LenderRecord) -> bool:
    return record.boot == boot() and start_ticks(record.pid) != record.ticks
