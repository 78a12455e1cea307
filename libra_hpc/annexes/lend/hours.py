"""Hours of the day in which an owner lends, such as ``20-08``, in the local time of the lender's machine."""

from __future__ import annotations

import re
from typing import NamedTuple

from libra_hpc.errors import invalid

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
