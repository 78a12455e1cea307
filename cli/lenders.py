"""`libra-hpc lenders`: who lends the idle time of a server's GPU, to which run, and why not now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from libra_hpc.annexes.lend import lender_record as records
from libra_hpc.annexes.lend.hours import Hours
from libra_hpc.annexes.lend.lender_record import LenderRecord
from libra_hpc.errors import OperationError, error_text, invalid

from .output import narrow_table, print_json, print_line, print_note, show
from .runs import JsonOption


def lenders(
    revoke: Annotated[str, typer.Option("--revoke", metavar="NAME", help="Give nothing from now on.")] = "",
    give_again: Annotated[str, typer.Option("--return", metavar="NAME", help="End a --revoke.")] = "",
    as_json: JsonOption = False,
) -> None:
    place = records.folder()
    found = records.all_records(place)
    for option, name in (("--revoke", revoke), ("--return", give_again)):
        if name and name not in found:
            raise invalid(option, name, "no such lender", sorted(found) or "there are none")
    try:
        if revoke:
            records.revoked_file(place, revoke).touch(mode=0o600)
            print_line(f"{revoke} gives nothing from now on; its guest leaves")
        if give_again:
            records.revoked_file(place, give_again).unlink(missing_ok=True)
            print_line(f"{give_again} gives again")
    except OSError as error:
        raise OperationError(f"{place} cannot be written: {error_text(error)}.") from error
    if revoke or give_again:
        return
    if as_json:
        print_json([facts(name, record, gone) for name, (record, gone) in found.items()])
    elif not found:
        print_note("nobody lends; `libra-hpc lend` starts a server that does")
    else:
        made = narrow_table("lender~", "host~", "state", "run~", "limits", "hours", "tokens>", "why~")
        for name, (record, gone) in found.items():
            made.add_row(*row(name, record, gone))
        show(made)


def row(name: str, record: LenderRecord | None, gone: bool) -> list[str]:
    if record is None:
        return [name, "", "gone" if gone else "unknown", "", "", "", "", "its record cannot be read"]
    state, why = ("gone", "its lender has ended") if gone else (record.state, record.why)
    borrower = "" if gone else Path(record.borrower).name
    terms = record.terms
    tokens = f"{record.tokens:,}"
    return [name, record.host, state, borrower, terms.slo, str(Hours.parse(terms.hours)), tokens, why]


def facts(name: str, record: LenderRecord | None, gone: bool) -> dict[str, object]:
    """Facts for JSON, without what identifies its process."""
    if record is None:
        return {"name": name, "state": "gone" if gone else "unknown"}
    known = msgspec.to_builtins(record)
    for private in ("boot", "ticks"):
        del known[private]
    return {**known, "state": "gone" if gone else record.state}
