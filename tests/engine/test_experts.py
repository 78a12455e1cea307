"""Experts that an engine reports are those of the passes that sampled its tokens, whatever else it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from libra_hpc.protocol.engine import Abort, Generated, WeightsApplied

from .engine_harness import EngineUnderTest, Model, engine_config, tokens_of, turn, versions
from .test_agreement import model_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LAYERS, TOP_K = 2, 2
Rows = npt.NDArray[np.int64]


@torch.no_grad()
def routed(model: Model, tokens: list[int]) -> Rows:
    """Experts of each token, ascending, in transformers."""
    out = model.reference(torch.tensor([tokens]), output_router_logits=True)
    chosen = [logits.topk(TOP_K, -1).indices.sort(-1).values for logits in out.router_logits]
    return torch.stack(chosen, dim=1).numpy()


class Context:
    """A sample that grows by turns and answers of tools, and the experts that are known of it."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.rows = tokens, np.zeros((0, LAYERS, TOP_K), np.int64)
        self.sampled: dict[int, int] = {}
        """Weight versions of sampled tokens, by place."""

    def take(self, done: Generated) -> None:
        new = np.frombuffer(done.experts, np.uint8).reshape(-1, LAYERS, TOP_K)
        made = [version for version, count in done.versions for _ in range(count)]
        self.sampled |= dict(enumerate(made, len(self.tokens)))
        self.tokens += tokens_of(done)
        self.rows = np.concatenate((self.rows, np.sort(new, -1)))
        assert len(self.rows) == (len(self.tokens) - 1 if made else len(self.rows))

    def wrong(self, models: dict[int, Model]) -> int:
        """Rows that are not of the weights under which the next sampled token was sampled."""
        found = {version: routed(models[version], self.tokens) for version in {*self.sampled.values()}}
        version, count = -1, 0
        for place in reversed(range(len(self.rows))):
            version = self.sampled.get(place + 1, version)
            count += bool((found[version][place] != self.rows[place]).any())
        return count


class Walks:
    """Random trajectories on one engine, which gets other weights between their turns and within."""

    def __init__(self, engine: EngineUnderTest, models: tuple[Model, ...], seed: int) -> None:
        self._engine, self._models, self._random = engine, models, Random(seed)
        self.known: dict[int, Model] = {7: models[0]}
        self.aborted = self.cached = self.mixed = 0
        self._system = self._tokens(600)

    def _tokens(self, most: int) -> list[int]:
        return [self._random.randrange(3, 120) for _ in range(self._random.randint(1, most))]

    def run(self, count: int, rounds: int) -> list[Context]:
        """``count`` at once, for so many turns or parts of one."""
        random = self._random
        # Siblings share prompts, some of which are computed in several steps.
        prompts = [self._system + self._tokens(20), self._system, self._tokens(40)]
        begins = [[], [], self._tokens(3), self._tokens(3)]
        contexts = [Context(random.choice(begins) + random.choice(prompts) + self._tokens(3)) for _ in range(count)]
        for _ in range(rounds):
            self._round(contexts)
        return contexts

    def _round(self, contexts: list[Context]) -> None:
        engine, random = self._engine, self._random
        requests = {
            f"r{i}": turn(f"r{i}", one.tokens, random.randint(1, 100), routed=len(one.rows))
            for i, one in enumerate(contexts)
        }
        awaited = {*requests}
        engine.start(*requests.values())
        if random.random() < 0.5:
            version = next(versions)
            self.known[version] = random.choice(self._models)
            engine.send(self.known[version].update(version))
            awaited.add("update")
        engine.send(*(Abort(rid) for rid in requests if random.random() < 0.3))
        while awaited:
            done = engine.receive()
            if isinstance(done, WeightsApplied):
                awaited.remove("update")
                continue
            assert isinstance(done, Generated), done
            awaited.remove(done.rid)
            one = contexts[int(done.rid[1:])]
            one.take(done)
            self.aborted += done.finish == "abort"
            self.cached += done.cached_tokens
            self.mixed += len(done.versions) > 1
            if done.finish != "abort":
                one.tokens += self._tokens(20)


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walks]:
    folder = tmp_path_factory.mktemp("f")
    models = tuple(model_of("qwen3_moe", folder / name, seed) for name, seed in (("one", 3), ("two", 4)))
    # A cache that two of the longest contexts fill.
    config = engine_config(models[0], version=7, kv_cache_mb=3, max_num_seqs=6)
    with closing(EngineUnderTest(folder / "e", config)) as engine:
        assert engine.ready().version == 7
        yield Walks(engine, models, seed=1)


@pytest.mark.parametrize("trajectories", [6, pytest.param(500, marks=pytest.mark.nightly)])
def test_experts_are_those_of_the_pass_that_sampled_the_next_token(walks: Walks, trajectories: int) -> None:
    found = [one for _ in range(0, trajectories, 6) for one in walks.run(6, rounds=3)]
    assert sum(one.wrong(walks.known) for one in found) == 0
    assert min(walks.aborted, walks.cached) > 0
    if trajectories > 6:
        # Tokens of several weights in a turn, and contexts that are computed again for lack of cache.
        assert min(walks.mixed, walks._engine.idle().preemptions) > 0
