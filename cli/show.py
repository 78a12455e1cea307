"""`libra-hpc show`: the text of the policy, from the transcripts of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from libra_hpc.config.load import load_resolved
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.rollout.records import transcripts
from libra_hpc.rollout.records.transcripts import Transcript

from .output import print_json, print_line, print_note
from .runs import RUNS, JsonOption, RunArgument, RunsOption, find_run


def show(
    run: RunArgument = None,
    step: Annotated[int | None, typer.Option("--step", min=0, metavar="N", help="Default: the newest.")] = None,
    worst: Annotated[int, typer.Option("--worst", min=0, metavar="K", help="The K of least reward.")] = 0,
    best: Annotated[int, typer.Option("--best", min=0, metavar="K", help="The K of most reward.")] = 0,
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME", help="Those of a task of several, or of an evaluation.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Those that failed, with the reason.")] = False,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="ID", help="Those of this prompt.")] = None,
    chars: Annotated[
        int, typer.Option("--chars", min=0, metavar="N", help="Longest part before its middle is left out; 0: all.")
    ] = 2000,
    as_json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    found = find_run(run, runs)
    records = _read(_file(found, step, task), task, prompt)
    lost, ended = ([record for record in records if bool(record.error) == wanted] for wanted in (True, False))
    ordered = sorted(ended, key=lambda record: record.reward)
    if failed or not ordered:
        records = lost
        print_note(f"{len(lost)} of {len(lost) + len(ordered)} trajectories failed")
    elif worst or best:
        records = ordered[:worst] + ordered[max(worst, len(ordered) - best) :]
    elif prompt is None:
        records = ordered[:1]
        others = "--worst, --best, --prompt" + (", --failed" if lost else "")
        print_note(f"the least reward of {len(ordered)} trajectories; others: {others}")
    decode = _decoder(load_resolved(found.readable_config))
    for record in records:
        if as_json:
            parts = [{"who": who, "text": decode(ids)} for who, ids in record.segments()]
            print_json({**msgspec.to_builtins(record), "text": parts})
        else:
            _print(record, decode, chars)


def _read(file: Path, task: str | None, prompt: str | None) -> list[Transcript]:
    records = list(transcripts.read(file, print_note))
    for option, wanted, part in (("task", task, "task"), ("prompt", prompt, "prompt_id")):
        known = sorted({getattr(record, part) for record in records})
        if wanted is not None and wanted not in known:
            raise invalid(f"--{option}", wanted, f"the step has no such {option}", known)
        records = [record for record in records if wanted in (None, getattr(record, part))]
    return records


def _file(run: RunDir, step: int | None, task: str | None) -> Path:
    """The transcripts of a step: of the evaluation ``task``, else of training, else of any evaluation."""
    names = [name for _, name in transcripts.files(run.transcripts)]
    have = transcripts.steps(run.transcripts, task if task in names else "" if "" in names else min(names, default=""))
    if not have:
        raise UserError(f"{run.name} has no transcripts (run.transcripts_gb = 0, a dry run, or no step yet).")
    if step is not None and step not in have:
        raise invalid("--step", step, "no transcripts of it", f"{min(have)} to {max(have)}")
    return have[max(have) if step is None else step]


def _decoder(config: RunConfig) -> Callable[[Sequence[int]], str]:
    """Token ids -> text; without the policy's tokenizer here, how many they are."""
    try:
        from libra_hpc.tasks.tokenizer import TaskTokenizer

        return TaskTokenizer(config.model.path).decode
    except (ImportError, UserError) as error:
        print_note(f"only lengths are shown: {error}")
        return lambda ids: f"({len(ids)} tokens)"


def _print(record: Transcript, decode: Callable[[Sequence[int]], str], chars: int) -> None:
    generated = sum(turn.gen_tokens for turn in record.turns)
    versions = sorted({version for version, _ in record.versions})
    weights = "-".join(map(str, [*versions[:1], *versions[1:][-1:]]))
    index, _, sample = record.uid.partition(".")
    ended = "failed" if record.error else f"reward {record.reward:.3g}, advantage {record.advantage:+.2f}"
    print_line(
        f"== step {record.step}, {record.prompt_id or f'prompt {index}'}, sample {sample}: {ended},"
        f" {len(record.turns)} turns, {generated} tokens, weights {weights or '-'}"
    )
    if record.error:
        print_line(f"   {record.error}")
    if record.info:
        print_line("   " + ", ".join(f"{key} {value:.3g}" for key, value in record.info.items()))
    for who, ids in record.segments():
        text = decode(ids)
        if chars and len(text) > chars:
            half = chars // 2
            text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
        print_line(f"-- {who} ({len(ids)})\n{text}")
