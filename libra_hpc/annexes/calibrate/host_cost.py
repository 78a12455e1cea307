"""The host's work per engine step, measured: `Device.host_s` and `Device.host_sequence_s` in a device file.

Operator tables and the roofline have the device's time alone. What real decode steps take beyond it is the host's work:
a part per step, and a part per sequence. It belongs to the machine, so it holds for other models and degrees too.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from libra_hpc.errors import error_text, invalid
from libra_hpc.files import write_result
from libra_hpc.models.devices import Device
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.fitting import non_negative
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.measured import MIN_POINTS, StepPoint

FIELDS = ("host_s", "host_sequence_s")
DIGITS = 3
"""Significant digits in the file: steps scatter by some per cent."""


def with_host_cost(found: Device, shape: ModelShape, points: Sequence[StepPoint]) -> Device:
    """``found`` with the host's work that these steps of ``shape`` show.

    Raises `UserError` for fewer than `MIN_POINTS` decode steps, and for steps shorter than the device's own time.
    """
    bare = msgspec.structs.replace(found, host_s=0.0, host_sequence_s=0.0)
    times = {tp: lookup(bare, shape, tp) for tp in {p.tp for p in points}}
    decodes = [p for p in points if p.decodes and not p.prefill]
    if len(decodes) < MIN_POINTS:
        raise invalid("decode steps", len(decodes), "too few to measure the host", f"at least {MIN_POINTS}")
    rest = [p.seconds - times[p.tp].step_s(p.decodes, p.kv_tokens) for p in decodes]
    if sum(rest) <= 0.0:
        raise invalid(
            "--devices",
            found.name,
            "the steps are shorter than this device's own time",
            "the name and figures of the measured device",
        )
    used = [(p, seconds) for p, seconds in zip(decodes, rest, strict=True) if seconds > 0.0]
    # Errors count relative to the whole step, so that the device's errors in long steps do not decide.
    host, sequence = non_negative(
        [(1.0 / seconds, p.decodes / seconds) for p, seconds in used],
        [(seconds / p.seconds) ** 2 for p, seconds in used],
    )
    return msgspec.structs.replace(found, host_s=_rounded(host), host_sequence_s=_rounded(sequence))


def write_host_cost(measured: Device, path: Path) -> None:
    """Write the two figures into the device file ``path``; other lines stay. A device that is new there gets an entry.

    Raises `UserError` for a file that cannot be read or written.
    """
    try:
        text = path.read_text() if path.exists() else ""
        known = {name.lower() for name in tomllib.loads(text)}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise invalid("--devices", str(path), error_text(error), "a TOML file with one table per device") from error
    values = msgspec.to_builtins(measured)
    lines = text.splitlines()
    if measured.name not in known:
        fields = [
            f"{key} = {json.dumps(value)}" for key, value in values.items() if key != "name" and value not in ("", [])
        ]
        lines += [*([""] if lines else []), f'["{measured.name}"]', *fields]
    else:
        lines = _replaced(lines, measured.name, {key: values[key] for key in FIELDS})
    write_result(path, ("\n".join(lines) + "\n").encode())


def _replaced(lines: Sequence[str], name: str, values: dict[str, float]) -> list[str]:
    """``lines`` with these values in the table ``name``."""
    out: list[str] = []
    inside = False
    for line in lines:
        key = line.partition("=")[0].strip()
        if line.lstrip().startswith("["):
            inside = line.split("#")[0].strip().strip("[]").strip("\"' ").lower() == name
        elif inside and key in values:
            continue
        out.append(line)
        if inside and line.lstrip().startswith("["):
            out += [f"{field} = {value}" for field, value in values.items()]
    return out


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")
