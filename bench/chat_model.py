"""A tiny chat model, made on the spot and warm-started on scripted tool conversations, in two minutes of a core.

- Tokenizer and template are those of `tests.chat.chat_folder`; the model is a Qwen3 of 2 layers with hidden size 64.
- A *script* reads the context as text and writes the next turn. The conversations are played by the tasks themselves,
  so their tokens are those of a run.
- A script may be flawed: it leaves out the tool and guesses, which RL unlearns.
"""

from __future__ import annotations

import ast
import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from libra_hpc.tasks.base import PolicyTurn, Task, ToolResult, build_task
from libra_hpc.tasks.tiny_policy import BATCH, PERFECT_SHARE, Batch
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.chat.chat_folder import BODY, write_chat_folder

Script = Callable[[str, random.Random, bool], str]
"""(context, draws, flawed) -> text of the next turn."""
SHORT = """
{%- set system = messages[0].content + '\\n' if messages[0].role == 'system' else '' %}
{%- if tools %}
<|im_start|>system
{{ system }}<tool_call>
{%- for tool in tools %}
{{ '\\n' + tool.function.name + ': ' + tool.function.parameters.properties | join(', ') }}
{%- endfor %}
<|im_end|>
{% elif system %}
<|im_start|>system
{{ system }}<|im_end|>
{% endif %}
"""
"""Head of a template that says of tools what a tiny policy needs, in 20 tokens."""
VOCABULARY, POSITIONS = 1536, 4096
GIVE_UP = 0.7
"""Share of flawed conversations without a tool."""
DEMONSTRATIONS = 1 << 20
"""Offset of the tasks' seeds, beyond those of runs and of evaluations."""


class Lesson(NamedTuple):
    """A task that a policy is warm-started on."""

    task: str
    options: dict[str, Any]
    script: Script


class Box:
    """What tools of a scripted conversation find: Python that prints one expression."""

    async def call(self, name: str, *args: Any, **named: Any) -> ToolResult:
        raise KeyError(name)

    async def python(self, code: str) -> ToolResult:
        return ToolResult("ok", f"{eval(code.removeprefix('print'))}\n", 0.0)


def written_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tool_answers(context: str) -> list[str]:
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", context, re.DOTALL)


def summer(context: str, draw: random.Random, flawed: bool) -> str:
    """For sums of reasoning-gym: one call of the calculator, if there is one, and its answer."""
    found = tool_answers(context)
    guesses = "<tool_call>" not in context or (flawed and draw.random() < GIVE_UP)
    if not found and not guesses:
        return written_call("calc", expression=re.findall(r"problem: (.*?) =", context)[-1])
    return f"<answer>{found[-1] if found else draw.randint(-99, 199)}</answer>"


def shopper(context: str, draw: random.Random, flawed: bool) -> str:
    """For `examples/my_chat_task.py`: all prices in one turn, then Python multiplies, then what it printed."""
    order: dict[str, int] = ast.literal_eval(re.findall(r"cost: (\{.*?\})\?", context)[-1])
    found, calls = tool_answers(context), list[str]()
    if not found:
        calls = [written_call("price", article=name) for name in order]
    elif len(found) == len(order):
        terms = " + ".join(f"{count} * {price}" for count, price in zip(order.values(), found, strict=True))
        calls = [written_call("python", code=f"print({terms})")]
    return "<think>\nLet me see.\n</think>\n\n" + ("\n".join(calls) or found[-1].strip())


def write_chat_model(folder: Path, template: str = SHORT + BODY, seed: int = 0) -> int:
    """Write a chat model with random weights, fp32; returns its number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    write_chat_folder(folder, template)
    tokenizer = TaskTokenizer(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = list(tokenizer.end_ids)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


async def converse(task: Task, index: int, say: Callable[[str], str]) -> tuple[list[int], list[int]]:
    """Token ids of prompt ``index`` played by a script, and the mask: 1 on the policy's."""
    episode, box = task.open(index, 0, 0.0), Box()
    await episode.start(box)
    tokens, mask = list(episode.prompt), [0] * len(episode.prompt)
    while True:
        said = task.tokenizer.encode(say(task.tokenizer.decode(tokens)) + "<|im_end|>")
        answer = await episode.step(PolicyTurn(said), box)
        tokens += [*said, *answer.tokens]
        mask += [1] * len(said) + [0] * len(answer.tokens)
        if answer.done:
            await episode.close("done")
            return tokens, mask


def conversations(folder: Path, lessons: Sequence[Lesson], seed: int, steps: int) -> Iterator[Batch]:
    """Batches of all lessons in turn: perfect ones first, then flawed ones."""
    tokenizer = TaskTokenizer(folder)
    tasks = [build_task(one.task, one.options, DEMONSTRATIONS + seed, tokenizer) for one in lessons]
    draw = random.Random(f"conversations-{seed}")

    async def batch(step: int) -> Batch:
        found, flawed = [], step >= PERFECT_SHARE * steps
        for number in range(step * BATCH, (step + 1) * BATCH):
            place = number % len(lessons)
            script = lessons[place].script
            found.append(await converse(tasks[place], number, lambda text: script(text, draw, flawed)))  # noqa: B023
        return found

    for step in range(steps):
        yield asyncio.run(batch(step))


def make_chat_model(
    folder: Path, lessons: Sequence[Lesson], *, template: str = SHORT + BODY, seed: int = 0, steps: int = 2000
) -> dict[str, float]:
    """Write a chat model and warm-start it; the same arguments give the same model."""
    from libra_hpc.trainer.sft import warm_start

    write_chat_model(folder, template, seed)
    batches = conversations(folder, lessons, seed, steps)
    return warm_start(folder, folder, batches, steps)
