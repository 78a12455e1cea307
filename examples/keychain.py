"""`KeyChain`: follow a chain of keyed look-ups with flaky, dead and missing keys, one token per word.

    <bos> find k0 \\n | get k0 \\n | flaky \\n | get k0 \\n | = k39 | k4 \\n      (next key k39, alternative k4)
    get k39 \\n -> dead \\n ; get k4 \\n -> = k31 | k12 \\n ; ... ; -> val v25 \\n ; ans v25 \\n  (done)

- A chain has 1 hop, and one more with probability ``p_more`` up to ``max_hops``: lengths are long-tailed.
- A key is *flaky* at its first call, or *dead*: never the first key, and never also flaky, because its alternative
  would be too far back for a small policy to copy.
- An alternative works only when its main key is dead. Any other key is answered ``miss``, a malformed call ``err``.
- ``notes`` lines ``note k7 k39`` before the question lengthen the context, not the episode.
- From ``progress`` >= ``drift_at`` on, ``after`` overrides the options, before it ``before``.

The task of `examples/quickstart.toml`. ``libra-hpc make-policy FOLDER --task examples/keychain.py:KeyChain`` makes a
policy that learns it on one CPU core, from `KeyChain.words` and `KeyChain.demonstrations`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from libra_hpc.errors import invalid
from libra_hpc.protocol.env import Signal
from libra_hpc.tasks.base import Episode, PolicyTurn, Task, TaskTokenizer, Tools, Turn
from libra_hpc.tasks.tool_outcome import signal_of

KEYS, VALUES = 64, 32
"""Sizes of the two alphabets; 12 hops use 24 keys."""

WORDS = ("<bos>", "\n", "find", "get", "ans", "=", "|", "flaky", "dead", "miss", "err", "val", "note")
"""All other words; those of every tiny policy (`libra_hpc.tasks.tiny_policy.SPECIAL`) among them."""

TURN_TOKENS = 4
"""``get k0 \\n`` and one spare token."""

WASTE_COST, WASTE_CAP, PROGRESS_REWARD = 0.02, 0.2, 0.3
"""Reward lost per wasted turn, its maximum, and the reward for the resolved hops of a failed episode.

Small against 1.0, so that solving dominates. Without reward for progress, a policy that cannot go on after ``dead``
learns to give up there.
"""

Hop = tuple[int, int, bool, bool]
"""(main key, alternative key, flaky, dead)"""


@dataclass(frozen=True)
class Mix:
    p_more: float = 0.72
    max_hops: int = 12
    flaky: float = 0.25
    dead: float = 0.25
    notes: int = 0

    def check(self, where: str) -> None:
        for name in ("p_more", "flaky", "dead"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise invalid(f"{where}{name}", value, "out of range", "a number from 0 to 1")
        for name, low, high in (("max_hops", 1, KEYS // 2), ("notes", 0, 4096)):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise invalid(f"{where}{name}", value, "out of range", f"an integer from {low} to {high}")


@dataclass(frozen=True)
class HiddenChain:
    """One prompt's chain; keys and values are numbers."""

    hops: tuple[Hop, ...]
    value: int
    notes: tuple[tuple[int, int], ...]

    @property
    def need(self) -> int:
        return len(self.hops) + sum(flaky + dead for _, _, flaky, dead in self.hops) + 1


def draw(rng: random.Random, mix: Mix) -> HiddenChain:
    length = 1
    while length < mix.max_hops and rng.random() < mix.p_more:
        length += 1
    keys = rng.sample(range(KEYS), 2 * length)
    hops = []
    for i in range(length):
        dead = i > 0 and rng.random() < mix.dead
        hops.append((keys[2 * i], keys[2 * i + 1], not dead and rng.random() < mix.flaky, dead))
    notes = tuple((rng.randrange(KEYS), rng.randrange(KEYS)) for _ in range(mix.notes))
    return HiddenChain(tuple(hops), rng.randrange(VALUES), notes)


def look_up(hops: Sequence[Sequence[Any]], value: int, key: int, earlier: int) -> list[Any]:
    """The tool ``get``: answer a key that was asked ``earlier`` times before.

    Returns [outcome], ["=", key, alternative] or ["val", value].
    """
    for i, (main, alternative, flaky, dead) in enumerate(hops):
        if key == main and dead:
            return ["dead"]
        if key == main and flaky and not earlier:
            return ["flaky"]
        if key == main or (key == alternative and dead):
            return ["=", hops[i + 1][0], hops[i + 1][1]] if i + 1 < len(hops) else ["val", value]
    return ["miss"]


class Guide:
    """Tracks an episode and its next right call."""

    def __init__(self, world: HiddenChain) -> None:
        self._hops = world.hops
        self._at = 0
        self._dead = False

    @property
    def resolved(self) -> int:
        return self._at

    @property
    def key(self) -> int | None:
        """Key to ask next; None when the value is found."""
        if self._at == len(self._hops):
            return None
        return self._hops[self._at][1 if self._dead else 0]

    def record(self, key: int, outcome: str) -> None:
        hop = next((i for i, (main, alternative, _, _) in enumerate(self._hops) if key in (main, alternative)), -1)
        if outcome in ("=", "val") and hop >= self._at:
            self._at, self._dead = hop + 1, False
        elif outcome == "dead" and hop == self._at:
            self._dead = True


class Words:
    def __init__(self, tokenizer: TaskTokenizer) -> None:
        self.word = {word: tokenizer.need(word) for word in WORDS}
        self.bos, self.newline, self.find, self.get, self.ans, *_, self.note = self.word.values()
        self.keys = [tokenizer.need(f"k{i}") for i in range(KEYS)]
        self.values = [tokenizer.need(f"v{i}") for i in range(VALUES)]
        self.key_of = {token: i for i, token in enumerate(self.keys)}
        self.value_of = {token: i for i, token in enumerate(self.values)}

    def prompt(self, world: HiddenChain) -> list[int]:
        lines = [token for a, b in world.notes for token in (self.note, self.keys[a], self.keys[b], self.newline)]
        return [self.bos, *lines, self.find, self.keys[world.hops[0][0]], self.newline]

    def answer(self, found: Sequence[Any]) -> list[int]:
        if found[0] == "=":
            return [self.word["="], self.keys[found[1]], self.word["|"], self.keys[found[2]], self.newline]
        if found[0] == "val":
            return [self.word["val"], self.values[found[1]], self.newline]
        return [self.word[found[0]], self.newline]


class KeyChainEpisode(Episode):
    """One episode, finished by ``need`` = hops + flaky + dead + 1 right turns; after ``2 * need + 4`` turns it ends,
    wrong.

    Reward: 1 for the right value, else ``PROGRESS_REWARD`` times the share of resolved hops. Minus ``WASTE_COST`` per
    wasted call (malformed, or not the next right one) and for exceeding the budget, at most ``WASTE_CAP``.
    """

    def __init__(self, words: Words, world: HiddenChain, prompt_id: str, after_drift: bool) -> None:
        self.prompt_id, self.prompt, self.max_tokens, self.stop_ids = (
            prompt_id,
            words.prompt(world),
            TURN_TOKENS,
            (words.newline,),
        )
        self._words, self._world, self._after = words, world, after_drift
        self._guide = Guide(world)
        self._asked: dict[int, int] = {}
        self._turns = self._waste = 0

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        words, tokens = self._words, turn.tokens
        self._turns += 1
        if len(tokens) == 3 and tokens[0] == words.ans and tokens[1] in words.value_of and tokens[2] == words.newline:
            return self._end(words.value_of[tokens[1]] == self._world.value)
        if len(tokens) == 3 and tokens[0] == words.get and tokens[1] in words.key_of and tokens[2] == words.newline:
            answer = await self._get(words.key_of[tokens[1]], tools)
        else:
            self._waste += 1
            answer = Turn(words.answer(["err"]), [Signal("get", "error", 2, 0.0)])
        if self._turns >= 2 * self._world.need + 4:
            self._waste += 1
            return self._end(False, answer.signals)
        return answer

    async def truncated(self, tools: Tools) -> Turn:
        return self._end(False)

    async def _get(self, key: int, tools: Tools) -> Turn:
        right = key == self._guide.key
        question = self._world.hops, self._world.value, key, self._asked.get(key, 0)
        result = await tools.call("get", *question)
        if result.outcome != "ok":  # the sandbox failed, not the policy: only the turn is lost
            return Turn(self._words.answer(["err"]), [signal_of("get", result, 2)])
        self._asked[key] = self._asked.get(key, 0) + 1
        self._waste += not right
        outcome = str(result.value[0])
        self._guide.record(key, outcome)
        answer = self._words.answer(result.value)
        return Turn(answer, [Signal("get", "ok" if outcome == "=" else outcome, len(answer), result.seconds)])

    def _end(self, solved: bool, signals: Sequence[Signal] = ()) -> Turn:
        reward = 1.0 if solved else PROGRESS_REWARD * self._guide.resolved / len(self._world.hops)
        info = {
            "solved": float(solved),
            "turns": self._turns,
            "waste": self._waste,
            "hops": len(self._world.hops),
            "after_drift": float(self._after),
        }
        return Turn(signals=signals, done=True, reward=reward - min(WASTE_CAP, WASTE_COST * self._waste), info=info)


HARD = Mix(p_more=0.8, dead=0.5)
"""Longer and more often dead than the default mix."""

LONG_SHARE, LONG_NOTES = 8, 128
"""Every eighth batch has 1 to 128 note lines per prompt: the policy learns to skip them."""

GIVE_UP = {"=": 0.12, "flaky": 0.45, "dead": 0.4}
GIVE_UP_ELSE, WRONG_RETRY = 0.12, 0.3
"""Probability of a random answer after any other outcome, and of retrying the wrong key after ``flaky``, ``dead``,
``miss``.
"""

MAX_CALLS = 3 * HARD.max_hops
"""Most calls of a flawed demonstration."""


def demonstrate(rng: random.Random, words: Words, world: HiddenChain, flawed: bool) -> tuple[list[int], list[int]]:
    """Token ids of one episode, and the mask (1 on the policy's tokens)."""
    tokens = words.prompt(world)
    mask = [0] * len(tokens)
    guide, asked, last, key, pair = Guide(world), dict[int, int](), "", -1, (world.hops[0][0], -1)

    def add(ids: list[int], policy: int) -> None:
        tokens.extend(ids)
        mask.extend([policy] * len(ids))

    for _ in range(MAX_CALLS):
        ask = guide.key
        if ask is None:
            add([words.ans, words.values[world.value], words.newline], 1)
            return tokens, mask
        if flawed and last:
            if rng.random() < GIVE_UP.get(last, GIVE_UP_ELSE):
                add([words.ans, words.values[rng.randrange(VALUES)], words.newline], 1)
                return tokens, mask
            if last in ("flaky", "dead", "miss") and rng.random() < WRONG_RETRY:
                ask = pair[1] if last == "flaky" and pair[1] >= 0 else key
        key = ask
        add([words.get, words.keys[key], words.newline], 1)
        found = look_up(world.hops, world.value, key, asked.get(key, 0))
        asked[key] = asked.get(key, 0) + 1
        last = str(found[0])
        guide.record(key, last)
        if last == "=":
            pair = (found[1], found[2])
        add(words.answer(found), 0)
    return tokens, mask


class KeyChain(Task):
    """See the module docstring."""

    tools = {"get": look_up}
    words = (*WORDS[2:], *(f"k{i}" for i in range(KEYS)), *(f"v{i}" for i in range(VALUES)))
    """Vocabulary of a tiny policy, beside its special tokens."""

    def __init__(
        self,
        tokenizer: TaskTokenizer,
        *,
        seed: int = 0,
        p_more: float = Mix.p_more,
        max_hops: int = Mix.max_hops,
        flaky: float = Mix.flaky,
        dead: float = Mix.dead,
        notes: int = Mix.notes,
        drift_at: float = 1.0,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer, seed=seed)
        if not isinstance(drift_at, (int, float)) or not 0 <= drift_at <= 1:
            raise invalid("task.options.drift_at", drift_at, "out of range", "a number from 0 to 1")
        base = Mix(p_more=p_more, max_hops=max_hops, flaky=flaky, dead=dead, notes=notes)
        base.check("task.options.")
        self._drift_at = drift_at
        self.mixes = (
            _override(base, "before", {} if before is None else before),
            _override(base, "after", {} if after is None else after),
        )
        """Before and after the drift."""
        self._words = Words(tokenizer)

    def open(self, index: int, sample: int, progress: float) -> KeyChainEpisode:
        after = progress >= self._drift_at and self.mixes[0] != self.mixes[1]
        prompt_id = f"keychain-{self.seed}-{int(after)}-{index}"
        return KeyChainEpisode(self._words, draw(random.Random(prompt_id), self.mixes[after]), prompt_id, after)

    @staticmethod
    def demonstrations(
        tokenizer: TaskTokenizer, seed: int, step: int, size: int, flawed: bool
    ) -> list[tuple[list[int], list[int]]]:
        """Batch ``step`` of a tiny policy's warm start, a function of the arguments.

        Perfect ones train copying. Flawed ones give up with a random value or retry the wrong key, habits that RL
        unlearns: a warm-started policy earns about half of the reward.
        """
        words, rng = Words(tokenizer), random.Random(f"keychain-demonstrations-{seed}-{step}")
        long = step % LONG_SHARE == LONG_SHARE - 1
        mixes = (replace(HARD, notes=rng.randint(1, LONG_NOTES) if long else 0) for _ in range(size))
        return [demonstrate(rng, words, draw(rng, mix), flawed) for mix in mixes]


def _override(base: Mix, side: str, changes: Mapping[str, Any]) -> Mix:
    names = [field.name for field in fields(Mix)]
    if not isinstance(changes, Mapping):
        raise invalid(f"task.options.{side}", changes, "not a table", f"a table of {', '.join(names)}")
    for name in changes:
        if name not in names:
            raise invalid(f"task.options.{side}", name, "no such option", names)
    mix = Mix(**{**{name: getattr(base, name) for name in names}, **changes})
    mix.check(f"task.options.{side}.")
    return mix
