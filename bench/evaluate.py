"""Evaluates a policy: mean reward over a fixed set of episodes, with the task, sandbox and engine of the run.

The set is the task's own data order from `FIRST_INDEX` on, one sample per prompt, beyond what training reaches. One
task seed gives every policy the same set. The default sampling temperature is 1, as in training.

``python -m bench.evaluate --policy FOLDER --config CONFIG.json [--episodes 512] [--progress 0.0]`` prints
one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from array import array
from pathlib import Path
from typing import Any

from libra_hpc.config.load import load_resolved
from libra_hpc.config.run import RunConfig
from libra_hpc.engine.offline import OfflineEngine
from libra_hpc.engine.settings import config_for_run
from libra_hpc.host.settings import host_command, host_settings, write_private
from libra_hpc.process.child import Child
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.engine import Generate, Generated
from libra_hpc.protocol.env import (
    EpisodeFailed,
    EpisodeOpened,
    EpisodeStepped,
    HostReady,
    OpenEpisode,
    StepEpisode,
    TruncateEpisode,
    from_host,
    to_host,
)

FIRST_INDEX = 1 << 40
"""No run trains this many prompts."""


class _Open:
    def __init__(self, message: EpisodeOpened) -> None:
        self.context = array("i")
        self.context.frombytes(message.tokens)
        self.max_tokens, self.stop_ids = message.max_tokens, message.stop_ids
        self.turns = self.generated = 0
        self.truncated = 0.0


class Evaluation:
    """One evaluation: ``episodes`` prompts at run progress ``progress``."""

    def __init__(
        self, policy: str, config: RunConfig, episodes: int, progress: float, temperature: float, seed: int
    ) -> None:
        self._config, self._episodes, self._progress, self._temperature = config, episodes, progress, temperature
        self._engine = OfflineEngine(config_for_run(config, model=policy, seed=seed))
        self._open: dict[str, _Open] = {}
        self._results: list[dict[str, float]] = []
        self._host: Child | None = None
        self._host_ready = asyncio.Event()
        self._failed = ""

    async def run(self) -> dict[str, Any]:
        """Sample every episode to its end; raises `RuntimeError` when the environment host dies."""
        folder = Path(tempfile.mkdtemp(prefix="libra-eval-"))
        host = Child(
            name="host",
            socket_path=folder / "host.sock",
            outbound=to_host,
            inbound=from_host,
            on_message=self._message,
            on_exit=self._exited,
        )
        self._host = host
        try:
            settings = folder / "host.json"
            write_private(settings, host_settings(self._config))
            await host.start(host_command(settings), dict(os.environ), folder / "log")
            await self._host_ready.wait()
            for i in range(self._episodes):
                host.send(OpenEpisode(str(i), FIRST_INDEX + i, 0, self._progress))
            while len(self._results) < self._episodes:
                if self._failed:
                    raise RuntimeError(f"{self._failed}: {(folder / 'log').read_text()[-500:]}")
                for done in self._engine.poll() if self._engine.pending else ():
                    self._generated(done)
                await asyncio.sleep(0.0 if self._engine.pending else 0.001)
        finally:
            await host.stop()
            shutil.rmtree(folder, ignore_errors=True)
        return self._summary()

    def close(self) -> None:
        self._engine.close()

    def _message(self, child: Child, message: Any) -> None:
        match message:
            case HostReady():
                self._host_ready.set()
            case EpisodeOpened(episode=episode):
                self._open[episode] = _Open(message)
                self._turn(episode)
            case EpisodeStepped(episode=episode, done=True, reward=reward, info=info):
                state = self._open.pop(episode)
                counts = {
                    "turns": float(state.turns),
                    "generated": float(state.generated),
                    "truncated": state.truncated,
                }
                self._results.append({**info, "reward": reward, **counts})
            case EpisodeStepped(episode=episode, tokens=tokens, new_sample=fresh):
                context = self._open[episode].context
                if fresh:
                    del context[:]
                context.frombytes(tokens[: context.itemsize * (self._config.rollout.max_model_len - len(context))])
                self._turn(episode)
            case EpisodeFailed(error=error):
                self._failed = error

    def _turn(self, episode: str) -> None:
        state = self._open[episode]
        room = min(state.max_tokens, self._config.rollout.max_model_len - len(state.context))
        if room <= 0:
            assert self._host is not None
            state.truncated = 1.0
            self._host.send(TruncateEpisode(episode))
            return
        self._engine.submit(
            Generate(
                rid=episode,
                prompt=state.context.tobytes(),
                max_tokens=room,
                temperature=self._temperature,
                stop_ids=state.stop_ids,
            )
        )

    def _generated(self, done: Generated) -> None:
        assert self._host is not None
        if done.finish == "error":
            raise RuntimeError(f"episode {done.rid}: {done.error}")
        state = self._open[done.rid]
        tokens = array("i")
        tokens.frombytes(done.tokens)
        state.context.extend(tokens)
        state.turns += 1
        state.generated += len(tokens)
        room = self._config.rollout.max_model_len - len(state.context)
        self._host.send(StepEpisode(done.rid, pack_i32(tokens), room, done.versions))

    def _exited(self, child: Child, code: int) -> None:
        self._failed = self._failed or ("" if child.stopping else f"environment host ended with {code}")
        self._host_ready.set()

    def _summary(self) -> dict[str, Any]:
        count = len(self._results)
        keys = sorted({key for result in self._results for key in result})
        means = {key: sum(r.get(key, 0.0) for r in self._results) / count for key in keys}
        mean = means["reward"]
        spread = (sum((r["reward"] - mean) ** 2 for r in self._results) / max(1, count - 1)) ** 0.5
        return {"episodes": count, **means, "reward_stderr": spread / count**0.5}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.evaluate")
    parser.add_argument("--policy", required=True, help="Hugging Face folder")
    parser.add_argument("--config", required=True, help="a run's config.json: task, tokenizer folder, engine settings")
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--progress", type=float, default=0.0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=12345, help="of the engine's sampling")
    arguments = parser.parse_args()
    config = load_resolved(Path(arguments.config))
    evaluation = Evaluation(
        policy=arguments.policy,
        config=config,
        episodes=arguments.episodes,
        progress=arguments.progress,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    print(json.dumps(asyncio.run(evaluation.run())), flush=True)
    evaluation.close()


if __name__ == "__main__":
    main()
