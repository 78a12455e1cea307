"""Demonstrations of `keychain` for the supervised warm start.

Perfect ones train copying. Flawed ones give up with a random value or retry the wrong key, habits that RL unlearns. A
warm-started policy should neither fail (no reward) nor excel (nothing to learn): it earns about half of the reward.
"""

from __future__ import annotations

import random
from dataclasses import replace

from .keychain import VALUES, Guide, HiddenChain, Mix, Words, draw, look_up

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


def demonstration_batch(
    words: Words, seed: int, step: int, size: int, flawed: bool
) -> list[tuple[list[int], list[int]]]:
    """Batch ``step`` of ``size`` demonstrations, a function of the arguments."""
    rng = random.Random(f"keychain-demonstrations-{seed}-{step}")
    long = step % LONG_SHARE == LONG_SHARE - 1
    batch = []
    for _ in range(size):
        mix = replace(HARD, notes=rng.randint(1, LONG_NOTES) if long else 0)
        batch.append(demonstrate(rng, words, draw(rng, mix), flawed))
    return batch
