"""What it costs to move a node between training and rollout: seconds of every part, both ways.

    python -m bench.moves [--quick] [--rounds 4]

One core node trains with Megatron; one hybrid node has a vLLM engine and a Megatron replica, which take turns. All
processes stay. A round, as within a step of time-sharing: turns run on the engine -> the node goes to training -> a
step -> it goes back with the step's weights -> a turn. Last comes a stay of `STAY` steps.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from msgspec.structs import replace

from bench.gpu_check_steps import SMALLER
from bench.gpu_model import random_model
from bench.harness import Figures, Options, median, options, progress, report
from bench.moves_scene import Scene
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.models.shapes import ModelShape
from tests.example_files import KEYCHAIN_TASK

VOCAB = 64
TURNS, LONG, RUN_S = 2, 2000, 1.0
"""Turns in flight when the order comes, their tokens at most, and seconds for which they run before it."""
STAY = 4
"""Steps of the last stay, of which all but the first are later ones."""
FIRST, LATER, BACK = "the first step, s", "a later step, s", "to rollout, s"
ABORTED = "  turns aborted"
"""Once the engine's step in flight has ended: seconds where bf16 is emulated, 20 ms on a GPU."""
MODELS: dict[str, ModelShape] = {
    "220m": replace(SMALLER[1], name="220m", layers=14, vocab=VOCAB),
    "tiny": replace(
        SMALLER[1], name="tiny", layers=2, hidden=128, head_dim=32, intermediate=256, heads=4, kv_heads=2, vocab=VOCAB
    ),
}
"""Qwen3 shapes. 220 M parameters are those of docs/LOG.md, where nearly all of them are in layers."""
TOKENS = {"220m": 4, "tiny": 128}
"""Of each of the two trajectories of a step: few where a CPU without bf16 units takes seconds for each."""


def configuration(model: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": 1_000_000},
            "model": {"path": str(model), "dtype": "bfloat16"},
            "task": {"name": KEYCHAIN_TASK},
            "algorithm": {"eta": 0, "prompts_per_step": 1, "group_size": 2, "skip_zero_advantage": False},
            "checkpoint": {"every": 0},
            "train": {"micro_tokens": 256, "snapshot_every": 0},
            "rollout": {"max_model_len": 2048, "kv_cache_mb": 256, "max_num_seqs": 8},
            "components": {"hybrid": {"nodes": 1}},
        }
    )


async def play(scene: Scene, steps: int = 1) -> Figures:
    """One round."""
    for number in range(TURNS):
        scene.turn(f"long-{number}", LONG)
    await asyncio.sleep(RUN_S)
    scene.clear()
    await scene.move("train")
    out = to_train(scene)
    seconds = [await scene.train() for _ in range(steps)]
    out |= {FIRST: seconds[0], LATER: median(seconds[1:] or seconds)}
    scene.clear()
    await scene.move("rollout")
    await scene.first_token()
    scene.mark("first token")
    out |= to_rollout(scene)
    out["pair, s"] = out["to training, s"] + out[BACK]
    out["pair without the turns, s"] = out["pair, s"] - out[ABORTED]
    return out


def to_train(scene: Scene) -> Figures:
    at, found = scene.marks, scene.figures
    return {
        "to training, s": at["done"] - at["ordered"],
        ABORTED: at["TurnsDrained"] - at["ordered"],
        "  engine asleep, replica awake": at["FormGeneration"] - at["TurnsDrained"],
        "  order reaches the replica": at["Join 2"] - at["FormGeneration"],
        "  replica joins": at["replica joined"] - at["Join 2"],
        "    takes memory": found["memory"],
        "    weights from the image": found["weights"],
        "    group with the core": found["replica joins"] - found["memory"] - found["weights"],
        "  core joins after that": max(0.0, at["core joined"] - at["replica joined"]),
        "  bytes received from the core": found["bytes"],
    }


def to_rollout(scene: Scene) -> Figures:
    at, found = scene.marks, scene.figures
    return {
        BACK: at["done"] - at["ordered"],
        "  others go on without it": at["StandbyEngine 2 train"] - at["ordered"],
        "    of it, in the core's process": found["core joins"],
        "  engine serves the newest weights": at["done"] - at["StartEngine 2 rollout"],
        "    until they are on the node": max(0.0, at.get("weights here", 0.0) - at["StartEngine 2 rollout"]),
        "    written into the image": found["image_s"],
        "    staged": found["stage_s"],
        "    applied": found["seconds"],
        "    versions loaded": found["updates"],
        "first token, s": at["first token"] - at["done"],
    }


async def measure(model: Path, size: str, rounds: int) -> list[Figures]:
    with tempfile.TemporaryDirectory(prefix="bench-moves-") as folder:
        run = RunDir.create(Path(folder), "moves")
        async with Scene(configuration(model), run, VOCAB, TOKENS[size]) as scene:
            progress(f"{size}: both nodes at work")
            await scene.train()
            await play(scene)  # starts the replica's process
            found = []
            for number in range(rounds):
                found.append(await play(scene))
                progress(f"{size}, round {number}: {found[-1]['pair, s']:.2f} s a pair")
            stay = await play(scene, STAY)
    return [one | {LATER: stay[LATER], f"to rollout after {STAY} steps, s": stay[BACK]} for one in found]


def main(given: Options) -> None:
    raw: dict[str, list[Figures]] = {}
    for size in given.rows:
        with random_model(MODELS[size], "cpu") as folder:
            raw[size] = asyncio.run(measure(folder, size, given.rounds))
    names = next(iter(raw.values()))[0]
    rows = [[name, *(median([one[name] for one in found]) for found in raw.values())] for name in names]
    notes = [f"Medians of {given.rounds} rounds; one thread a process, bf16; the last line is one move."]
    report(given, "A node between training and rollout", columns=["", *raw], rows=rows, notes=notes, raw=raw)


if __name__ == "__main__":
    main(options("moves", __doc__, rows=tuple(MODELS), quick=("tiny",), rounds=4))
