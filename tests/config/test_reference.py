"""The reference of keys: complete, short sentences, and the page in docs."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from libra_hpc.config import reference
from libra_hpc.config.learn import EvalPart, TrainPart
from libra_hpc.config.load import flat
from libra_hpc.config.run import RunConfig
from tests.docs import keys_page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
COMMAND = "python -m tests.docs.keys_page > docs/configuration.md"
LONGEST = 25
"""Words of a sentence."""
RECORDS = reference.as_records(reference.tables())


def test_the_page_in_docs_is_the_one_the_schema_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == keys_page.page(), f"the schema has changed; run: {COMMAND}"


def test_every_key_of_a_run_is_in_the_reference_with_its_default() -> None:
    defaults = {record["key"]: record["default"] for record in RECORDS}
    for section, table in RunConfig().as_data().items():
        for key, value in table.items():
            if isinstance(value, dict) and f"{section}.{key}" not in defaults:
                assert {name: defaults.pop(f"{section}.{key}.{name}") for name in value} == value
            else:
                assert defaults.pop(f"{section}.{key}") == value
    for section, part in (("train", TrainPart()), ("eval", EvalPart())):
        for name, value in flat(msgspec.to_builtins(part), prefix=f"task.{section}.").items():
            assert defaults.pop(name) == value
    assert defaults == {}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["key"])
def test_every_key_is_described_in_sentences_of_at_most_25_words(record: dict[str, str]) -> None:
    assert record["description"].endswith(".")
    assert not set("^$\\+") & set(record["valid"].replace("$VAR", "")), "a regular expression"
    for sentence in re.split(r"[.;:] ", record["description"]):
        assert len(sentence.split()) <= LONGEST, sentence


def test_the_page_is_readable_in_a_terminal() -> None:
    assert max(len(line) for line in keys_page.page().splitlines()) <= reference.WIDTH


def test_a_section_or_one_key_can_be_selected() -> None:
    records = reference.as_records(reference.select("algorithm"))
    assert {record["key"].split(".")[0] for record in records} == {"algorithm"}
    assert len(reference.select("components")) == 6
    (record,) = reference.as_records(reference.select("components.train.nodes"))
    shown = {"key": "components.train.nodes", "valid": "an integer >= 0 and <= 10000", "unit": "", "default": 1}
    assert record == {**shown, "description": record["description"], "set_in": ["run file"]}
    (record,) = reference.as_records(reference.select("slurm.account"))
    assert record["set_in"] == ["run file", "site profile", "components.*.account"]
