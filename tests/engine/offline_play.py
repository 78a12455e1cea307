"""One engine in this process, as measurements and evaluations have it; prints what it saw, for test_offline.

It generates batches and turns, and takes new weights.
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
from libra_hpc.protocol.engine import Generate, UpdateWeights


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


def main(job: dict[str, Any]) -> None:
    context, seen = job["context"], {}
    with OfflineEngine(msgspec.convert(job["config"], EngineConfig)) as offline:
        prefixes = [(str(n), pack_i32(context[:n])) for n in job["lengths"]]
        batch = offline.generate([Generate(name, tokens, 6, temperature=0.0) for name, tokens in prefixes])
        seen["finish"] = [done.finish for done in batch]
        seen["batch"] = [unpack_i32(done.tokens) for done in batch]
        seen["turns"] = turns(offline, context)
        seen["swapped"] = swapped(offline, msgspec.convert(job["update"], UpdateWeights), context)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
