"""Groups of trajectories: their progress for the planner, and the statistics of the global batch they become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from libra_hpc.facts.columns import COLUMNS
from libra_hpc.policies.learning.advantages import Advantage, LengthRules, Refill, all_equal, mean_and_std
from libra_hpc.protocol.agents import Group
from libra_hpc.protocol.engine_state import LenderKind
from libra_hpc.protocol.plan import GroupFact, TrajectoryFact

from .trajectory import Trajectory


def length_of(trajectory: Trajectory) -> TrajectoryFact:
    """Tokens, turns and tool seconds of a finished trajectory."""
    return TrajectoryFact(
        index=-1,
        at=trajectory.finished_at,
        generated=trajectory.generated,
        context=trajectory.all_tokens,
        turns=len(trajectory.turns),
        tool_s=sum(turn.tool_s for turn in trajectory.turns),
        group=trajectory.index,
        prompt=trajectory.prompt_tokens,
    )


def open_groups(episodes: Iterable[Trajectory], now: float, decode_s: float) -> tuple[GroupFact, ...]:
    """Groups with open trajectories, by index; a group without a known prompt is left out.

    Engines answer whole turns. A turn sent ``s`` seconds ago counts as s / ``decode_s`` tokens, at most its limit.
    ``decode_s``: seconds per token; 0.0: unknown, and the turn counts as 0 tokens.
    """
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in episodes:
        groups.setdefault(trajectory.index, []).append(trajectory)
    found = []
    for index, members in sorted(groups.items()):
        prompt = max(t.prompt_tokens for t in members)
        if prompt:
            running = [t for t in members if t.sent_at > 0.0]
            parts = (one for t in running for one in t.growing)
            generated = sum(one.generated + _turn(one, now, decode_s) for one in parts)
            found.append(
                GroupFact(
                    index=index,
                    prompt=prompt,
                    waiting=len(members) - len(running),
                    running=len(running),
                    generated=generated,
                )
            )
    return tuple(found)


def _turn(trajectory: Trajectory, now: float, decode_s: float) -> int:
    if trajectory.place != "engine" or decode_s <= 0.0:
        return 0
    return min(trajectory.max_tokens - trajectory.turns[-1].gen_tokens, int((now - trajectory.sent_at) / decode_s))


TASK_PREFIX = "task_"
"""Before a number of the task that has the name of a column of `metrics.jsonl`."""
ANY_LENGTH, NO_REFILL = LengthRules(), Refill()
TRUNCATED = "truncated"
"""Number of a trajectory whose context had no room for another turn: 1.0. Others have 0.0 without saying so."""


class GroupState:
    """The trajectories of one prompt; complete when none is open.

    ``recovered``: trajectories that an earlier start has finished or begun; ``version``: weights at its admission.
    """

    def __init__(self, index: int, samples: int, recovered: Sequence[Trajectory] = (), version: int = -1) -> None:
        self.index, self.version = index, version
        self.done = [trajectory for trajectory in recovered if trajectory.place == "done"]
        finished = {trajectory.sample for trajectory in self.done}
        self.begun = {trajectory.sample: trajectory for trajectory in recovered if trajectory.sample not in finished}
        self.missing = tuple(sample for sample in range(samples) if sample not in finished)
        """Samples to run, from the prompt or, those in ``begun``, from where they are."""
        self.open = len(self.missing)
        self._group: Group | None = None
        self.failed = self.retried = 0
        """Trajectories given up, and attempts that were tried again."""

    @property
    def equal(self) -> bool:
        """Whether all rewards are equal: the group has no gradient."""
        return all_equal([trajectory.reward for trajectory in self.done])

    def rewards(self, rules: LengthRules) -> list[float]:
        """The tasks' rewards of the trajectories that count."""
        return [trajectory.reward for trajectory, _ in self.counted(rules)]

    def counted(self, rules: LengthRules) -> list[tuple[Trajectory, float]]:
        """The trajectories that count, by sample, with their rewards as the advantages see them."""
        self.done.sort(key=lambda t: t.sample)
        shaped = [rules.shaped(t.reward, t.context, t.info.get(TRUNCATED) == 1.0) for t in self.done]
        return [(t, reward) for t, reward in zip(self.done, shaped, strict=True) if reward is not None]

    def to_group(
        self,
        advantage: Advantage,
        rules: LengthRules = ANY_LENGTH,
        refill: Refill = NO_REFILL,
        numbers: Mapping[str, int] = MappingProxyType({}),
    ) -> Group:
        """The complete group for the trainer, without the trajectories that do not count; the same at every call.

        One that ``refill`` would replace, past its bound, has no advantages. ``numbers``: those of engines.
        """
        if self._group is not None:
            return self._group
        counted = self.counted(rules)
        equal = refill.replaces(self.rewards(rules))
        rewards, turns = [reward for _, reward in counted], [[turn.reward for turn in t.turns] for t, _ in counted]
        values = [0.0] * len(counted) if equal or not counted else advantage(rewards, turns)
        pairs = zip(counted, values, strict=True)
        samples = (sample for (t, _), a in pairs for sample in t.samples_for_training(a, numbers))
        self._group = Group(self.index, tuple(samples))
        return self._group


def quantile(values: Sequence[float], q: float) -> float:
    """Nearest-rank quantile of a non-empty sequence."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def batch_stats(
    groups: Sequence[GroupState],
    trainer_version: int,
    busy_per_token_s: float = 0.0,
    engines: int = 1,
    parts: Sequence[str] = (),
    replaced: int = 0,
    of_guests: Mapping[str, LenderKind] = MappingProxyType({}),
) -> dict[str, float]:
    """Statistics of a batch, every group of which has a finished trajectory.

    ``parts``: tasks of a mixture; ``replaced``: groups of equal rewards that these took the places of; ``of_guests``:
    engines that were not the run's own, and of what kind.
    """
    trajectories = [t for group in groups for t in group.done]
    reward, reward_std = mean_and_std([t.reward for t in trajectories])
    staleness = [trainer_version - t.oldest for t in trajectories]
    generated = [t.generated for t in trajectories]
    return {
        "reward": reward,
        "reward_std": reward_std,
        "equal_groups": (sum(group.equal for group in groups) + replaced) / (len(groups) + replaced),
        "replaced_groups": replaced,
        "trajectories": len(trajectories),
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        "gen_tokens": sum(generated),
        "experts_mb": sum(len(t.experts) for t in trajectories) / 1e6,
        "gen_tokens_p50": quantile(generated, 0.5),
        "gen_tokens_p95": quantile(generated, 0.95),
        **_of_turns(trajectories),
        **_of_guests(trajectories, of_guests),
        "context_p50": quantile([t.context for t in trajectories], 0.5),
        "failed": sum(group.failed for group in groups),
        "retried": sum(group.retried for group in groups),
        # Replaced groups are taken to be as long.
        "rollout_s": sum(generated) * (1 + replaced / len(groups)) * busy_per_token_s / max(1, engines),
        **_own_numbers([t for t in trajectories if t.task not in parts]),
        **_of_parts(trajectories, parts),
    }


def _of_parts(trajectories: Sequence[Trajectory], parts: Sequence[str]) -> dict[str, float]:
    """Numbers of each task of a mixture over its own trajectories; a batch without any has none of them."""
    found: dict[str, float] = {}
    for part in parts:
        own = [t for t in trajectories if t.task == part]
        if own:
            numbers = {
                "reward": sum(t.reward for t in own) / len(own),
                "turns": sum(len(t.turns) for t in own) / len(own),
                "gen_tokens": sum(t.generated for t in own) / len(own),
                "trajectories": float(len(own)),
                **_own_numbers(own),
            }
            found |= {f"{part}/{key}": value for key, value in numbers.items()}
    return found


def _of_guests(trajectories: Sequence[Trajectory], kinds: Mapping[str, LenderKind]) -> dict[str, float]:
    lent = Counter[str]()
    for turn in (turn for t in trajectories for turn in t.turns if turn.engine in kinds):
        lent[kinds[turn.engine]] += turn.gen_tokens
    return {"guest_tokens": lent.total(), "spot_tokens": lent["spot"], "lent_tokens": lent["lender"]}


def _of_turns(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts = [len(t.turns) for t in trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    return {
        "turns_p50": quantile(counts, 0.5),
        "turns_p95": quantile(counts, 0.95),
        "recomputed_tokens": sum(turn.recomputed for turn in turns),
        "old_kv_tokens": sum(turn.gen_tokens for turn in turns if turn.kv_version >= 0),
        "evicted_tokens": sum(turn.evicted for turn in turns),
        "samples_per_trajectory": 1.0 + sum(turn.new_sample for turn in turns) / len(trajectories),
    }


def _own_numbers(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means of the tasks' own numbers, each over the trajectories that have it."""
    taken = {column.name for column in COLUMNS}
    means: dict[str, float] = {}
    for key in sorted({key for t in trajectories for key in t.info}):
        name = f"{TASK_PREFIX}{key}" if key in taken else key
        values = [t.info.get(key, 0.0) for t in trajectories if key in t.info or key == TRUNCATED]
        means[name] = sum(values) / len(values)
    return means
