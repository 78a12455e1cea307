"""The configuration of a run as its directory has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import REMOVED, load_resolved, validate
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"run": {"na', "the configuration of the run cannot be read: Unterminated string starting at"),
        ("", "the configuration of the run cannot be read: Expecting value"),
        ("[" * 100_000, "the configuration of the run cannot be read: it is nested too deeply."),
        ("[]", "the configuration of the run is not a JSON object."),
        ('{"run": {"nmae": "x"}}', "run.nmae = 'x': unknown key in [run]"),
        ("\udcff", "the configuration of the run cannot be read: "),
    ],
)
def test_a_damaged_configuration_is_named_with_its_reason(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        load_resolved(path)
    assert str(caught.value).startswith(f"{path}: {reason}")


@pytest.mark.parametrize("key", REMOVED)
def test_a_key_that_is_gone_has_a_sentence_in_a_run_file_and_is_dropped_from_an_older_run(
    key: str, tmp_path: Path
) -> None:
    tables: Any = "x"
    for name in reversed(key.split(".")):
        tables = {name: tables}
    with pytest.raises(UserError) as caught:
        validate(tables)
    assert str(caught.value) == f"{key}: this key is gone; {REMOVED[key]}."
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tables))
    assert load_resolved(path).as_data() == RunConfig().as_data()
    path.write_text('{"borrow": {"lenders": true}}')
    assert load_resolved(path).borrow.lenders == "any", "as it was written then"
