"""`libra-hpc task try`: play one episode of a task, with turns of a script or of a policy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from libra_hpc.config.load import apply_override, merged, validate, with_absolute_paths
from libra_hpc.config.run import RunConfig
from libra_hpc.config.site import site_profile
from libra_hpc.errors import OperationError, error_text, invalid
from libra_hpc.host.trial import Writer, play_one
from libra_hpc.tasks.tokenizer import TaskTokenizer

from .check import load
from .config_show import OverrideOption
from .output import print_json, print_line
from .runs import JsonOption

BETWEEN = "---"
"""Line between two turns of a script."""

app = typer.Typer(no_args_is_help=True)


@app.callback()
def task() -> None:
    """Stands before ``try``: typer makes a group of one command a plain verb."""


@app.command("try")
def try_task(
    named: Annotated[str, typer.Argument(metavar="TASK", help="FILE:CLASS, reasoning_gym:NAME, or a run file.")],
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FOLDER", help="It writes the turns. Default: model.path.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option("--script", metavar="FILE", help=f"It has the turns, a line {BETWEEN} between two.")
    ] = None,
    prompt: Annotated[int, typer.Option("--prompt", min=0, metavar="N", help="Of the data order.")] = 0,
    override: OverrideOption = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    """Play one episode; print prompt, turns, tool results and the parts of the reward."""
    config = _config(named, policy, override)
    write = _sampled(config.model.path) if script is None else _scripted(script, config.model.path)
    lines: list[dict[str, object]] = []

    def report(who: str, text: str) -> None:
        if json:
            lines.append({"who": who, "text": text})
        else:
            print_line(f"-- {who}\n{text}")

    end = asyncio.run(play_one(config, prompt, write, report))
    if json:
        ended = {} if end is None else {"reward": end.reward, "info": end.info}
        print_json({"told": lines, **ended})
    elif end is not None:
        parts = "".join(f", {name} {value:.4g}" for name, value in end.info.items())
        print_line(f"== reward {end.reward:.4g}{parts}")
    if end is None:
        raise OperationError("The script has no further turn, and the episode goes on.")


def _config(named: str, policy: Path | None, overrides: list[str]) -> RunConfig:
    folder = [] if policy is None else [f"model.path={policy}"]
    if named.endswith(".toml"):
        config = load(Path(named), [*overrides, *folder])
    else:
        own: dict[str, Any] = {"task": {"name": named}}
        for one in (*overrides, *folder):
            apply_override(own, one)
        config = with_absolute_paths(validate(merged(site_profile(), own)))
    if not config.model.path:
        raise invalid("--policy", "", "not given", "a Hugging Face folder; with --script its tokenizer is enough")
    return config


def _scripted(script: Path, folder: str) -> Writer:
    """Turns of a file; a turn gets an end-of-sequence token unless it ends with a stop id already."""
    try:
        texts = iter(script.read_text(encoding="utf-8").split(f"\n{BETWEEN}\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise invalid("--script", str(script), f"it cannot be read ({error_text(error)})", "a text file") from error
    tokenizer = TaskTokenizer(folder)

    def write(context: list[int], most: int, stop_ids: tuple[int, ...]) -> list[int] | None:
        text = next(texts, None)
        if text is None:
            return None
        ids = tokenizer.encode(text.removesuffix("\n"))
        stopped = ids[-1:] and ids[-1] in stop_ids
        ids += [] if stopped or tokenizer.eos_id not in stop_ids else [tokenizer.eos_id]
        return ids[:most]

    return write


def _sampled(folder: str) -> Writer:
    """Turns of the policy at temperature 1, on the CPU or the first GPU."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        why = f"it needs torch and transformers ({error})"
        raise invalid("--policy", folder, why, "an interpreter of the nodes, or --script FILE") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.to(device)

    def write(context: list[int], most: int, stop_ids: tuple[int, ...]) -> list[int]:
        ids = torch.tensor([context], device=device)
        plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, eos_token_id=list(stop_ids) or None, **plain
        )
        generated: list[int] = found[0, len(context) :].tolist()
        return generated

    return write
