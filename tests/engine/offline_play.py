"""One engine in this process, as measurements and evaluations have it; prints what it saw, for test_offline.

It generates batches and turns, takes new weights, and loses and regains its KV room while requests run.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import msgspec

from libra_hpc.engine.offline import OfflineEngine
from libra_hpc.engine.settings import EngineConfig
from libra_hpc.protocol.codec import pack_i32, unpack_i32
from libra_hpc.protocol.engine import Generate, Generated, UpdateWeights

PROMPTS = [[number + 3, 17, 99, number + 40] * 20 for number in range(8)]
TOKENS = 160


def turns(offline: OfflineEngine, context: list[int]) -> list[int]:
    """Two turns of three tokens each: the second continues the first."""
    tokens: list[int] = []
    for name in ("first", "second"):
        offline.submit(Generate(name, pack_i32([*context, *tokens]), 3, temperature=0.0))
        while offline.pending:
            tokens += itertools.chain.from_iterable(unpack_i32(done.tokens) for done in offline.poll())
    return tokens


def swapped(offline: OfflineEngine, update: UpdateWeights, context: list[int]) -> list[int]:
    offline.engine.check(update)
    while not offline.engine.staged():
        time.sleep(0.01)
    offline.engine.apply(update)
    (done,) = offline.generate([Generate("s", pack_i32(context), 6, temperature=0.0)])
    return unpack_i32(done.tokens)


def lose_room(offline: OfflineEngine) -> dict[str, object]:
    engine = offline.engine
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    open_: set[str] = set()
    seen: dict[str, object] = {}

    def submit(name: str) -> None:
        context = PROMPTS[int(name)] + tokens[name]
        request = Generate(rid=name, prompt=pack_i32(context), max_tokens=TOKENS - len(tokens[name]), temperature=0.0)
        open_.add(name)
        take([done] if (done := engine.submit(request)) else [])

    def take(finished: list[Generated]) -> list[str]:
        for done in finished:
            tokens[done.rid] += unpack_i32(done.tokens)
            assert done.finish in ("abort", "length"), done
            open_.discard(done.rid)
        return [done.rid for done in finished]

    def steps(count: int) -> None:
        for _ in range(count):
            if engine.busy:
                take(engine.step())

    for name in tokens:
        submit(name)
    while engine.busy:
        steps(1)
    seen["whole"] = dict(tokens)
    tokens = {name: [] for name in tokens}
    for name in tokens:
        submit(name)
    steps(10)
    for share in (0.5, 0.25, 0.0, 1.0):
        seen[f"ended at {share}"] = take(engine.set_kv_share(share))
        steps(5)
        stats = engine.stats()
        seen[f"stats at {share}"] = [stats.kv_share, stats.running, stats.kv_use]
        if share == 0.5:
            # As a weight update does.
            engine._drop_caches()
            seen["forgotten"] = not len(engine._kv._pool.cached_block_hash_to_block)
            seen["share after it"] = [engine.stats().kv_share, engine._kv.usable]
            steps(30)
        if share == 0:
            submit("0")
            seen["refused"] = "0" not in open_
    for name in tokens:
        if name not in open_ and len(tokens[name]) < TOKENS:
            submit(name)
    while engine.busy:
        steps(1)
    seen["again"] = tokens
    seen["use"] = engine.stats().kv_use
    return seen


def main(job: dict[str, Any]) -> None:
    context, seen = job["context"], {}
    with OfflineEngine(msgspec.convert(job["config"], EngineConfig)) as offline:
        prefixes = [(str(n), pack_i32(context[:n])) for n in job["lengths"]]
        batch = offline.generate([Generate(name, tokens, 6, temperature=0.0) for name, tokens in prefixes])
        seen["finish"] = [done.finish for done in batch]
        seen["batch"] = [unpack_i32(done.tokens) for done in batch]
        seen["turns"] = turns(offline, context)
        seen["room"] = lose_room(offline)
        seen["swapped"] = swapped(offline, msgspec.convert(job["update"], UpdateWeights), context)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
