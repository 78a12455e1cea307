"""`libra-hpc config`: the merged configuration of a run file or a run, and explanations of keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from libra_hpc_cli.check import site_config

from libra_hpc.config.load import flat, load_run_file
from libra_hpc.config.reference import as_records, tables
from tests.slurm.test_examples import EXAMPLES

from .conftest import Cli, Queue


@pytest.fixture
def profile(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = site / "site.toml"
    path.write_text('[slurm]\naccount = "rl"\n')
    monkeypatch.setenv("LIBRA_HPC_SITE", str(path))
    return path


def test_show_prints_a_run_file_that_gives_the_same_configuration(site: Path, profile: Path, cli: Cli) -> None:
    shown = json.loads(cli("config", "show", "run.toml", "-o", "rollout.tp=2").out)
    written = cli("config", "show", "run.toml", "-o", "rollout.tp=2", "--toml").out
    assert "[deadlines]" not in written
    (site / "again.toml").write_text(written)
    assert load_run_file(site / "again.toml").as_data() == shown
    assert shown["slurm"]["account"] == "rl"
    assert cli("config", "show", "run.toml", "--json").out == cli("config", "show", "run.toml").out


def test_show_prints_the_configuration_of_a_run(site: Path, profile: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml", "-o", "rollout.block_size=16")
    shown = json.loads(cli("config", "show", "quick-001").out)
    assert (shown["rollout"]["block_size"], shown["slurm"]["account"]) == (16, "rl")
    assert shown["model"]["path"] == str(site / "model")
    refused = cli("config", "show", "quick-001", "-o", "rollout.tp=2")
    assert (refused.code, refused.err) == (
        2,
        "error: -o 'rollout.tp=2': it changes a run file, and quick-001 is a run.\n",
    )


def test_explain_names_valid_values_default_meaning_places_and_the_present_value(
    site: Path, profile: Path, cli: Cli
) -> None:
    text = " ".join(cli("config", "explain", "slurm.account", "--run", "run.toml").out.split())
    assert "- `account`: string; default `" in text
    assert "Slurm account that is charged" in text
    assert "Also allowed in: site profile, components.*.account." in text
    assert 'Now `"rl"`.' in text
    (record,) = json.loads(cli("config", "explain", "rollout.tp", "--run", "run.toml", "--json").out)
    assert (record["set_in"], record["value"]) == (["run file"], 1)
    records = json.loads(cli("config", "explain", "components", "--json").out)
    assert {"components.split", "components.hybrid.nodes"} <= {record["key"] for record in records}


FILES = [one["key"] for one in as_records(tables()) if one["valid"] == "a path" and not one["key"].startswith("task.")]


@pytest.mark.parametrize("key", [*FILES, "compute.python", "planner.model", "algorithm.reference"])
def test_every_path_expands_home_and_variables_and_is_relative_to_where_one_types(
    key: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "files" / "x").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(site))
    monkeypatch.setenv("FILES", "files")
    found = {flat(site_config({key: path}).as_data())[key] for path in ("~/files/x", "$HOME/$FILES/x", "files/x")}
    assert found == {str(site / "files" / "x")}


@pytest.mark.parametrize("key", ["rollout.policy", "task.name", "task.reward", "algorithm.loss", "algorithm.advantage"])
def test_a_name_in_a_file_is_such_a_path_too(key: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(site))
    assert flat(site_config({key: "~/x.py:name"}).as_data())[key] == f"{site}/x.py:name"


def test_a_dry_run_takes_the_short_name_of_a_model(site: Path, cli: Cli) -> None:
    dry = ("-o", "run.engine=simulated", "-o", "model.path=qwen3-4b", "-o", f"run.dir={site}")
    (site / "examples").symlink_to(EXAMPLES)
    assert cli("check", str(EXAMPLES / "a800-8.toml"), *dry).out.splitlines()[-1].endswith("a800-8.toml is good")
