"""Habits of a shell: completion in bash, zsh and fish, and help that comes at once."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from libra_hpc_cli import app

from libra_hpc import compiled
from libra_hpc.facts.rundir import RunDir

from .conftest import Cli, Outcome
from .test_install import names

DOCS = Path(__file__).parents[2] / "docs"
HELP_MODULES = 400
"""Most modules that `libra-hpc --help` imports.  A cold one takes 0.3 s of a core with 340."""
PROGRAM = [sys.executable, "-c", "from libra_hpc_cli.app import main; main()"]


def asked(shell: str, words: str) -> dict[str, str]:
    """What a shell puts into the environment to complete the last of ``words``."""
    if shell == "bash":
        return {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    return {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}


def completions(shell: str, words: str) -> str:
    done = subprocess.run(
        PROGRAM,
        env={**os.environ, app.COMPLETING: f"complete_{shell}", **asked(shell, words)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_verbs_runs_options_and_keys(shell: str, submitted: RunDir) -> None:
    (submitted.path.parent / "no-run").mkdir()
    verbs = completions(shell, "libra-hpc s")
    assert all(verb in verbs for verb in app.VERBS if verb.startswith("s"))
    assert "cancel" not in verbs
    runs = completions(shell, "libra-hpc status ")
    assert "quick-001" in runs
    assert "no-run" not in runs
    assert "quick-001" in completions(shell, "libra-hpc submit --resume q")
    assert "--resume" in completions(shell, "libra-hpc submit --res")
    assert "algorithm.eta=" in completions(shell, "libra-hpc submit run.toml -o algorithm.e")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("libra-hpc config show r", "run.toml"),
        ("libra-hpc config explain rollout.m", "rollout.max_model_len"),
        ("libra-hpc cancel quick", "quick-001"),
        ("libra-hpc logs --runs elsewhere q", ""),
        ("libra-hpc trace ins", "inspect"),
    ],
)
def test_other_words_are_completed_too(words: str, offered: str, submitted: RunDir) -> None:
    assert offered in completions("bash", words).split() or completions("bash", words).strip() == offered


GROUPS = {
    "calibrate": "engine train",
    "config": "show explain",
    "cluster": "up env down status",
    "env": "probe",
    "lend": "serve list revoke",
    "task": "try",
    "trace": "inspect generate",
}
VERBS = [name for name in app.VERBS if name not in GROUPS]


def test_the_help_lists_every_verb(cli: Cli) -> None:
    text = cli("--help").out
    assert [verb for verb in app.VERBS if f" {verb} " not in text] == []


@pytest.mark.parametrize(
    "command", [*VERBS, *GROUPS, *(f"{group} {verb}" for group, verbs in GROUPS.items() for verb in verbs.split())]
)
def test_the_help_of_a_verb_fits_80_columns_and_names_its_arguments_plainly(
    command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = cli(*command.split(), "--help")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert f"Usage: libra-hpc {command} " in outcome.out
    assert max(map(len, lines)) <= 80
    unclear = ["[[", "<int"] if command in GROUPS else ["[[", "<int", "<bool>"]
    assert [mark for mark in unclear if mark in outcome.out] == []
    if command in VERBS:
        assert app.VERBS[command].help.split()[0] in outcome.out
        assert "{" not in lines[1]


@pytest.mark.parametrize("name", app.VERBS)
def test_the_help_of_a_verb_ends_with_an_example_that_parses_and_its_page(
    name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, parsed = app.VERBS[name], list[str]()
    shown = " ".join(cli(name, "--help").out.split())
    assert shown.endswith(f"Example: libra-hpc {name} {verb.example} Page: docs/{verb.page}.md")
    assert f"libra-hpc {name}" in (DOCS / f"{verb.page}.md").read_text()
    monkeypatch.setattr(app.Command, "invoke", lambda command, context: parsed.append(context.command_path))
    assert cli(name, *shlex.split(verb.example)) == Outcome(0, "", "")
    assert f"{parsed[0]} ".startswith(f"libra-hpc {name} ")


def test_a_login_node_has_the_help_of_every_verb_and_all_but_one(tmp_path: Path) -> None:
    """What is not installed there is hidden."""
    login = {*names("login"), "libra-hpc"}
    hidden = [
        module
        for module, packages in metadata.packages_distributions().items()
        if not {re.sub("[-_.]+", "-", package).lower() for package in packages} & login
    ]
    site = tmp_path / "site.toml"
    site.write_text('compute.python = "/cuda/bin/python"\n')
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({hidden}))\n"
        "from libra_hpc_cli import app\n"
        "print([verb for verb in app.VERBS if app.run([verb, '--help'])], app.run(['adapter', 'run', 'out']))"
    )
    environ = {**os.environ, "LIBRA_HPC_SITE": str(site)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.splitlines()[-1] == "[] 2"
    assert done.stderr.splitlines()[-1].endswith(
        "which this environment lacks; that of the nodes has it: /cuda/bin/libra-hpc adapter."
    )


def test_the_help_imports_no_verb_and_little_else() -> None:
    code = (
        "import sys; from libra_hpc_cli import app; app.run(['--help'])\n"
        "print(sorted({'pydantic', 'submitit', 'jinja2', 'numpy', 'libra_hpc.config'} & set(sys.modules)))\n"
        "print(len(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    found, modules = done.stdout.splitlines()[-2:]
    assert found == "[]"
    assert int(modules) <= HELP_MODULES


def test_the_version_is_that_of_the_package(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.INTERPRETED, "1")
    assert cli("--version") == Outcome(0, f"libra-hpc {metadata.version('libra-hpc')} (scheduler interpreted)\n", "")


def test_a_verb_without_streams_does_its_work() -> None:
    command = 'exec "$@" >&- 2>&-'
    assert subprocess.run(["bash", "-c", command, "bash", *PROGRAM, "config", "explain", "run.steps"]).returncode == 0
