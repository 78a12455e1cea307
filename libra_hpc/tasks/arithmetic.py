"""``arithmetic``: integer arithmetic from PyPI `reasoning-gym`, with a calculator and a Python tool, in text.

    Calculate 12 * ( 7 - 3 ).\\n | <calc>12 * (7 - 3)</calc> | <result>48</result>\\n | <answer>48</answer>   (done)

- A turn ends at ``</calc>``, ``</python>`` or ``</answer>``; its first complete tag counts.
- ``<python>`` answers what the code prints; a failed tool or a turn without a tag ``<result>error: ...</result>``.
- An answer, or the end of ``max_turns`` (wrong), ends the episode; the data set's scorer gives the reward.
- Problems have parentheses and + - *: without parentheses or with /, reasoning-gym 0.1.25 has wrong answers.
- Any byte-complete tokenizer works. Closing tags that are single tokens become stop ids; else a turn ends at the
  end-of-sequence id or ``max_tokens``.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from libra_hpc.errors import UserError, invalid
from libra_hpc.protocol.env import Signal

from .base import Episode, PolicyTurn, Task, ToolResult, Tools, Turn
from .tokenizer import TaskTokenizer
from .tool_outcome import signal_of

TAGS = ("<calc>", "</calc>", "<python>", "</python>", "<result>", "</result>", "<answer>", "</answer>")
"""Single tokens of a tokenizer made for this task."""

INSTRUCTIONS = (
    "Solve the problem. You may compute with <calc>expression</calc> or <python>code that prints</python> and read the"
    " <result>; give the final integer as <answer>integer</answer>.\n"
)
"""Prefix of the problem with ``instructions = true``, for models without a warm start on this task."""

DATASET_SIZE = 2**31
"""Distance of data set seeds: reasoning-gym seeds problem i with ``seed + i``, so data sets share no problem."""

EXPRESSION_CHARS, LARGEST = 256, 10**30
"""Limits of the calculator: characters of an expression, and size of any value (towers of ``**``)."""

_ACTION = re.compile(r"<(calc|python|answer)>(.*?)</\1>", re.DOTALL)
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """The tool ``calc``: evaluate numbers, + - * / // % and parentheses; raises `ValueError` for anything else."""
    if len(expression) > EXPRESSION_CHARS:
        raise ValueError(f"longer than {EXPRESSION_CHARS} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError) as error:
        raise ValueError("not an expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    return str(int(value)) if value == int(value) else repr(value)


def _evaluate(node: ast.expr) -> int | float:
    value: int | float
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value  # type: ignore[assignment]
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_evaluate(node.operand))
    else:
        raise ValueError("only numbers, + - * / // % and parentheses")
    if not abs(value) < LARGEST:
        raise ValueError("too large")
    return value


def problems(seed: int, min_terms: int, max_terms: int, min_digits: int, max_digits: int) -> Any:
    """reasoning-gym's data set: ``[i]`` has question, answer and metadata; ``score_answer(text, entry)`` is in [0, 1].

    Raises `UserError` when reasoning-gym is not installed or refuses the sizes.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            "task 'arithmetic' needs the package reasoning-gym on the node that runs tools: pip install"
            " 'reasoning-gym>=0.1.20'."
        ) from error
    sizes = {"min_terms": min_terms, "max_terms": max_terms, "min_digits": min_digits, "max_digits": max_digits}
    try:
        return reasoning_gym.create_dataset(
            "basic_arithmetic",
            seed=seed * DATASET_SIZE,
            size=DATASET_SIZE,
            operators=["+", "-", "*"],
            allow_parentheses=True,
            **sizes,
        )
    except AssertionError as error:
        raise invalid("task.options", sizes, str(error)) from error


class ArithmeticEpisode(Episode):
    def __init__(self, task: Arithmetic, entry: dict[str, Any], prompt_id: str) -> None:
        self.prompt_id = prompt_id
        self.prompt = task.tokenizer.encode(f"{task.preamble}{entry['question']}\n")
        self.max_tokens, self.stop_ids = task.max_tokens, task.stop_ids
        self._task, self._entry = task, entry
        self._turns = self._calls = self._failed = 0

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        self._turns += 1
        found = _ACTION.search(self._task.tokenizer.decode(turn.tokens))
        if found is not None and found[1] == "answer":
            return self._end(float(self._task.score(found[2].strip(), self._entry)))
        signals: list[Signal] = []
        if found is None:
            text = "error: no complete <calc>, <python> or <answer>"
        else:
            result = await (tools.python(found[2]) if found[1] == "python" else tools.call("calc", found[2]))
            text = _shown(result)
            self._calls += 1
        answer = self._task.tokenizer.encode(f"<result>{text}</result>\n")
        if found is not None:
            self._failed += result.outcome != "ok"
            signals = [signal_of(found[1], result, len(answer))]
        if self._turns >= self._task.max_turns:
            return self._end(0.0, signals)
        return Turn(answer, signals)

    async def truncated(self, tools: Tools) -> Turn:
        return self._end(0.0)

    def _end(self, reward: float, signals: Sequence[Signal] = ()) -> Turn:
        info = {
            "solved": float(reward == 1.0),
            "turns": self._turns,
            "calls": self._calls,
            "failed_calls": self._failed,
        }
        return Turn(signals=signals, done=True, reward=reward, info=info)


def _shown(result: ToolResult) -> str:
    """A tool's answer for the policy: at most 200 characters; of an error the last ones."""
    text = str(result.value).strip()
    if result.outcome == "ok":
        return text[:200]
    return f"error: {'out of time' if result.outcome == 'timeout' else text[-200:]}"


class Arithmetic(Task):
    """See the module docstring."""

    tools = {"calc": calculate}

    def __init__(
        self,
        tokenizer: TaskTokenizer,
        *,
        seed: int = 0,
        min_terms: int = 2,
        max_terms: int = 4,
        min_digits: int = 1,
        max_digits: int = 2,
        max_turns: int = 6,
        max_tokens: int = 96,
        instructions: bool = False,
    ) -> None:
        super().__init__(tokenizer, seed=seed)
        for name, value in (("max_turns", max_turns), ("max_tokens", max_tokens)):
            if value < 1:
                raise invalid(f"task.options.{name}", value, "out of range", "an integer >= 1")
        self._problems = problems(
            seed, min_terms=min_terms, max_terms=max_terms, min_digits=min_digits, max_digits=max_digits
        )
        self.preamble = INSTRUCTIONS if instructions else ""
        self.max_turns, self.max_tokens = max_turns, max_tokens
        ends = [tokenizer.id_of(tag) for tag in ("</calc>", "</python>", "</answer>")]
        self.stop_ids = tuple(sorted({token for token in (*ends, tokenizer.eos_id) if token is not None}))
        self.score: Callable[[str, dict[str, Any]], float] = self._problems.score_answer

    def open(self, index: int, sample: int, progress: float) -> ArithmeticEpisode:
        """See `Task.open`."""
        return ArithmeticEpisode(self, self._problems[index % DATASET_SIZE], f"arithmetic-{self.seed}-{index}")


GIVE_UP, SLIP, PYTHON_SHARE = 0.25, 0.2, 0.25
"""Flawed demonstrations: probability of a random answer without a call, of a wrong last digit, of ``python`` for
``calc``.
"""

DEMONSTRATION_SEED = 1 << 20
"""Offset of demonstration seeds, beyond the seeds of runs."""


@cache
def _demonstration_problems(seed: int) -> Any:
    return problems(DEMONSTRATION_SEED + seed, min_terms=2, max_terms=4, min_digits=1, max_digits=2)


def demonstration_batch(
    tokenizer: TaskTokenizer, seed: int, step: int, size: int, flawed: bool
) -> list[tuple[list[int], list[int]]]:
    """Batch ``step`` of the warm start: (token ids, mask with 1 on the policy's tokens) of each demonstration."""
    rng = random.Random(f"arithmetic-demonstrations-{seed}-{step}")
    data = _demonstration_problems(seed)
    batch = []
    for i in range(size):
        entry = data[step * size + i]
        expression, answer = entry["metadata"]["expression"], str(entry["answer"])
        call = f"<python>print({expression})</python>" if rng.random() < PYTHON_SHARE else f"<calc>{expression}</calc>"
        parts = [(f"{entry['question']}\n", 0), (call, 1), (f"<result>{answer}</result>\n", 0)]
        if flawed and rng.random() < GIVE_UP:
            parts, answer = parts[:1], str(rng.randint(-99, 99))
        elif flawed and rng.random() < SLIP:
            answer = answer[:-1] + str(rng.randrange(10))
        tokens: list[int] = []
        mask: list[int] = []
        for text, policy in (*parts, (f"<answer>{answer}</answer>", 1)):
            ids = tokenizer.encode(text)
            tokens += ids
            mask += [policy] * len(ids)
        batch.append((tokens, mask))
    return batch
