"""The task ``keychain``: its data order, its tool, its rewards and its demonstrations."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.errors import UserError
from libra_hpc.tasks.base import PolicyTurn, ToolResult, Turn
from libra_hpc.tasks.tiny_policy import SPECIAL
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.example_files import keychain

KeyChain, KeyChainEpisode, HiddenChain = keychain.KeyChain, keychain.KeyChainEpisode, keychain.HiddenChain
Guide, Words = keychain.Guide, keychain.Words


class InProcessTools:
    """The tool without a process."""

    async def call(self, name: str, *args: Any, **named: Any) -> ToolResult:
        assert name == "get"
        return ToolResult("ok", keychain.look_up(*args), 0.001)


class Player:
    """A policy that writes the task's words."""

    def __init__(self, task: KeyChain, episode: KeyChainEpisode, world: HiddenChain) -> None:
        self.words, self.episode, self.world = Words(task.tokenizer), episode, world
        self.tools = InProcessTools()
        self.guide = Guide(world)
        self.context = list(episode.prompt)

    def turn(self, *tokens: int) -> Turn:
        turn = asyncio.run(self.episode.step(PolicyTurn(list(tokens)), self.tools))
        self.context += [*tokens, *turn.tokens]
        return turn

    def get(self, key: int) -> Turn:
        turn = self.turn(self.words.get, self.words.keys[key], self.words.newline)
        for signal in turn.signals:
            self.guide.record(key, {"ok": "="}.get(signal.outcome, signal.outcome))
        return turn

    def answer(self, value: int) -> Turn:
        return self.turn(self.words.ans, self.words.values[value], self.words.newline)

    def perfect(self) -> Turn:
        while (key := self.guide.key) is not None:
            assert not self.get(key).done
        return self.answer(self.world.value)


@pytest.fixture
def task(keychain_folder: Path) -> KeyChain:
    return KeyChain(TaskTokenizer(keychain_folder), seed=3)


def start(task: KeyChain, want: Any = lambda world: True) -> Player:
    """The first episode whose hidden chain fits."""
    for index in range(10_000):
        episode = task.open(index, 0, 0.0)
        if want(episode._world):
            return Player(task, episode, episode._world)
    raise AssertionError("no such episode")


def test_vocabulary_round_trips_through_the_tokenizer(task: KeyChain) -> None:
    words = [*SPECIAL.values(), *KeyChain.words]
    assert len(set(words)) == task.tokenizer.size == 111
    text = "<bos> note k3 k4 \n find k0 \n get k0 \n = k39 | k4 \n val v25 \n ans v25 \n"
    ids = task.tokenizer.encode(text)
    assert [words[i] for i in ids] == [w for w in text.replace("\n", " \n ").split(" ") if w]
    assert task.tokenizer.encode(task.tokenizer.decode(ids)) == ids
    assert task.tokenizer.eos_id == task.tokenizer.need("\n")


def test_prompt_depends_on_seed_and_index_alone(keychain_folder: Path, task: KeyChain) -> None:
    again = KeyChain(TaskTokenizer(keychain_folder), seed=3)
    for index in (0, 1, 7, 10**12):
        siblings = [task.open(index, sample, 0.0) for sample in range(4)] + [again.open(index, 9, 0.4)]
        assert len({(s.prompt_id, tuple(s.prompt), s._world) for s in siblings}) == 1
    first = [task.open(i, 0, 0.0) for i in range(100)]
    assert len({e.prompt_id for e in first}) == 100
    other = [KeyChain(task.tokenizer, seed=4).open(i, 0, 0.0) for i in range(100)]
    assert not {e.prompt_id for e in first} & {e.prompt_id for e in other}
    assert [e._world for e in first] != [e._world for e in other]


def test_perfect_policy_gets_one(task: KeyChain) -> None:
    turns = []
    for index in range(300):
        episode = task.open(index, 0, 0.0)
        player = Player(task, episode, episode._world)
        end = player.perfect()
        assert (end.done, end.reward, end.info["solved"], end.info["waste"]) == (True, 1.0, 1.0, 0)
        assert end.info["turns"] == episode._world.need
        turns.append(end.info["turns"])
    assert max(turns) > 3 * sorted(turns)[150]  # long-tailed


def test_every_outcome_of_the_tool(task: KeyChain) -> None:
    player = start(task, lambda w: len(w.hops) == 2 and w.hops[0][2] and w.hops[1][3])
    (first, spare, _, _), (dead, alternative, _, _) = player.world.hops
    unknown = next(k for k in range(64) if k not in (first, spare, dead, alternative))
    seen = [player.get(key) for key in (first, first, first, spare, unknown, dead, dead, alternative)]
    assert [signal.outcome for t in seen for signal in t.signals] == [
        "flaky",
        "ok",
        "ok",
        "miss",
        "miss",
        "dead",
        "dead",
        "val",
    ]
    assert [signal.payload_tokens for t in seen for signal in t.signals] == [2, 5, 5, 2, 2, 2, 2, 3]
    text = [task.tokenizer.decode(t.tokens) for t in seen]
    assert text[1] == f"= k{dead} | k{alternative} \n"
    assert text[7] == f"val v{player.world.value} \n"
    w = player.words
    malformed = player.turn(w.get, w.get, w.get, w.get)
    assert (task.tokenizer.decode(malformed.tokens), malformed.signals[0].outcome) == ("err \n", "error")
    answers = ([w.ans, w.keys[0], w.newline], [w.ans, w.values[0]], [])
    for line in (*answers, [w.get, w.values[0], w.newline], [w.get, w.keys[0], w.newline, w.newline]):
        assert task.tokenizer.decode(start(task).turn(*line).tokens) == "err \n"
    # Waste: asking hop 0 again, the spare of a living key, an unknown key, the dead key twice, and the malformed line.
    end = player.answer(player.world.value)
    assert end.info["waste"] == 5
    assert end.reward == pytest.approx(1 - 0.02 * 5)


def test_drift_changes_the_mix_at_its_time(keychain_folder: Path) -> None:
    tokenizer = TaskTokenizer(keychain_folder)
    options: dict[str, Any] = {"drift_at": 0.5, "before": {"p_more": 0.3, "notes": 20}, "after": {"p_more": 0.85}}
    task = KeyChain(tokenizer, **options)
    early, late = ([task.open(i, 0, progress) for i in range(300)] for progress in (0.49, 0.5))
    assert {len(e.prompt) for e in early} == {84}
    assert {len(e.prompt) for e in late} == {4}
    hops = [sum(len(e._world.hops) for e in side) / 300 for side in (early, late)]
    assert hops[0] < 1.7
    assert hops[1] > 5
    assert not {e.prompt_id for e in early} & {e.prompt_id for e in late}
    plain = KeyChain(tokenizer)
    assert plain.open(5, 0, 0.0).prompt_id == plain.open(5, 0, 1.0).prompt_id


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p_more": 1.5}, r"task.options.p_more = 1.5: out of range; valid: a number from 0 to 1"),
        ({"max_hops": 40}, r"task.options.max_hops = 40: out of range; valid: an integer from 1 to 32"),
        ({"drift_at": -1}, r"task.options.drift_at = -1"),
        ({"after": {"p_mor": 0.5}}, r"task.options.after = 'p_mor': no such option; valid: .*did you mean 'p_more'"),
        ({"after": 5}, r"task.options.after = 5: not a table; valid: a table of p_more, "),
        ({"before": {"notes": "many"}}, r"task.options.before.notes = 'many'"),
    ],
)
def test_bad_options_are_named(keychain_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        KeyChain(TaskTokenizer(keychain_folder), **options)
