"""Processes whose nine threads are the first to decode a value of every type that the product decodes."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any

import msgspec
from msgspec import inspect

from tests.house.sources import modules

THREADS = 9
DEPTH = 5
"""Of structs within structs; deeper lists are empty."""
PLAIN = {inspect.StrType: "a", inspect.BytesType: b"", inspect.BoolType: True, inspect.IntType: 1, inspect.FloatType: 1}


def example(kind: Any, depth: int = 0) -> Any:
    """A value of a type, before it is encoded; whether it fits patterns and ranges does not matter here."""
    match kind:
        case inspect.StructType() | inspect.NamedTupleType():
            named = {one.encode_name: example(one.type, depth + 1) for one in kind.fields}
            tagged = {kind.tag_field: kind.tag, **named} if getattr(kind, "tag_field", None) else named
            return tagged if getattr(kind, "array_like", True) is False else [*tagged.values()]
        case inspect.TupleType():
            return [example(one, depth) for one in kind.item_types]
        case inspect.CollectionType():
            return [example(kind.item_type, depth)] if depth < DEPTH else []
        case inspect.DictType():
            return {example(kind.key_type): example(kind.value_type, depth)}
        case inspect.UnionType():
            return example(kind.types[0], depth)
        case inspect.LiteralType():
            return kind.values[0]
    return PLAIN.get(type(kind))


def decodings(module: Any) -> Iterator[tuple[Callable[[bytes], Any], bytes]]:
    """The decoders of a module, with bytes of each kind of message."""
    for value in [*vars(module).values()]:
        decoder = getattr(value, "_decoder", value)
        if isinstance(decoder, (msgspec.json.Decoder, msgspec.msgpack.Decoder)):
            kind = inspect.type_info(decoder.type)
            encode = (msgspec.json if isinstance(decoder, msgspec.json.Decoder) else msgspec.msgpack).encode
            for one in kind.types if isinstance(kind, inspect.UnionType) else [kind]:
                yield decoder.decode, encode(example(one))


def decode_first(names: list[str]) -> None:
    """What a new process does."""
    found, together = [one for name in names for one in decodings(import_module(name))], threading.Barrier(THREADS)

    def run(first: int) -> None:
        together.wait()
        for decode, data in (*found[first:], *found[:first]):
            with suppress(msgspec.ValidationError):
                decode(data)

    with ThreadPoolExecutor(THREADS) as threads:
        [*threads.map(run, range(THREADS))]
    os._exit(0 if len(found) > len(names) else 1)


def main(processes: int) -> None:
    """Run so many, two at a time."""
    sys.setswitchinterval(1e-6)
    texts = {".".join(parts): path.read_text() for parts, path in modules().items()}
    names = [name for name, text in texts.items() if re.search(r"^\S.*(Decoder|Codec)\(", text, re.MULTILINE)]
    for _ in range(0, processes, 2):
        children = [os.fork() or decode_first(names) for _ in range(2)]
        assert not any(os.waitpid(child, 0)[1] for child in children if child)


if __name__ == "__main__":
    main(int(sys.argv[1]))
