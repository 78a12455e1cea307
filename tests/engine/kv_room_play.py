"""One engine whose KV room shrinks, ends and comes back while requests run; prints what it saw, for test_kv_room."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from libra_hpc.engine.settings import prepare_process, read_config
from libra_hpc.protocol.codec import pack_i32, unpack_i32
from libra_hpc.protocol.engine import Generate, Generated

PROMPTS = [[number + 3, 17, 99, number + 40] * 20 for number in range(8)]
TOKENS = 160


def resident(part: str = "Rss") -> int:
    """Bytes of this process."""
    rows = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(rows[part].split()[0]) * 1024


def main(config_path: str) -> None:
    config = read_config(config_path)
    prepare_process(config)
    from libra_hpc.engine.core import RolloutEngine

    engine = RolloutEngine(config)
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
    seen["whole"], seen["rss"] = dict(tokens), [resident()]
    tokens = {name: [] for name in tokens}
    for name in tokens:
        submit(name)
    steps(10)
    for share in (0.5, 0.25, 0.0, 1.0):
        seen[f"ended at {share}"] = take(engine.set_kv_share(share))
        steps(5)
        stats = engine.stats()
        seen[f"stats at {share}"] = [stats.kv_share, stats.running, stats.kv_use]
        seen["rss"].append(resident())  # type: ignore[attr-defined]
        if share == 0.5:
            # As a weight update does.
            engine._forget()
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
    engine.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
