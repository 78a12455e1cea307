"""Agents of three APIs are trained on the tokens that they saw, whatever they do with their history."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from libra_hpc.endpoint.agent_endpoint import AgentEndpoint
from libra_hpc.endpoint.agent_task import AgentEnvironment, AgentTask
from libra_hpc.endpoint.conversation import CAUSES
from libra_hpc.errors import EnvironmentFailed, OperationError, UserError
from libra_hpc.process.child_environment import clean_own
from libra_hpc.tasks.mixture import MixedTask
from libra_hpc.tasks.tokenizer import TaskTokenizer

from .played import AGENTS, Played, call, play, task_for, write_rows


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site's proxy, which reaches nothing here; agents read it as their host does (`libra_hpc.host.host.main`)."""
    dead = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    for name, value in {**dead, "no_proxy": ".corp", "NO_PROXY": ".corp"}.items():
        monkeypatch.setenv(name, value)
    clean_own()


def task_of(
    tokenizer: TaskTokenizer, folder: Path, agent: str, wall_s: float = 60.0, **settings: Any
) -> AgentEnvironment:
    row, reward = {"prompt": "What is there?", **settings.pop("row", {})}, settings.pop("reward", "one")
    env = {"sandbox": "none", "limits": {"wall_s": wall_s}, **settings.pop("env", {})}
    return task_for(tokenizer, folder, row, reward=reward, given={"env": env, **settings}, agent=f"{AGENTS}:{agent}")


def looks_and_talks(context: str) -> str:
    turn = context.count("<|im_start|>assistant")
    return call("look", thing=f"train {turn}") if turn % 2 else f"  I see {turn}.\n"


def continued(played: Played) -> bool:
    """Whether each context is the one before with its turn and an addition, within one sample."""
    pairs = zip(played.contexts, played.turns, played.contexts[1:], strict=False)
    return all(after[: len(before) + len(turn)] == [*before, *turn] for before, turn, after in pairs)


async def test_every_api_and_its_stream_make_the_same_sample(tokenizer: TaskTokenizer, tmp_path: Path) -> None:
    kinds = ("completions", "completions_streamed", "responses", "anthropic")
    found = [await play(task_of(tokenizer, tmp_path, kind), looks_and_talks) for kind in kinds]
    for played in found:
        assert played.end.done
        assert played.end.info["agent_failed"] == 0
        assert (len(played.turns), played.samples) == (4, 1)
        assert continued(played)
        assert played.contexts == found[0].contexts, "all of them saw the same tokens"
    assert "a train 3\n</tool_response>" in found[0].texts(tokenizer)[-1]
    assert [played.most[0] for played in found] == [2**31 - 1] * 3 + [999], "most tokens are the request's"


async def test_a_request_that_does_not_go_on_begins_a_sample_with_a_cause(
    tokenizer: TaskTokenizer, tmp_path: Path
) -> None:
    played = await play(task_of(tokenizer, tmp_path, "forgetful"), lambda context: "yes")
    assert played.end.info["agent_failed"] == 0
    causes = {cause: played.end.info.get(f"new_{cause}", 0) for cause in CAUSES}
    assert causes == {"parallel": 0, "rewritten": 1, "tools": 1, "unbridged": 0, "thinking": 0}
    assert played.samples == 1 + sum(causes.values())
    first, _, back = played.contexts[:3]
    assert back[: len(first) + len(played.turns[0])] == [*first, *played.turns[0]], "what was sampled is kept"


async def test_equal_requests_are_turns_of_their_own_but_for_retries(tokenizer: TaskTokenizer, tmp_path: Path) -> None:
    said: list[str] = []

    def policy(context: str) -> str:
        said.append(f"turn {len(said) + 1}")
        return said[-1]

    played = await play(task_of(tokenizer, tmp_path, "stubborn"), policy, delay_s=0.2)
    assert played.end.info["agent_failed"] == 0
    assert len(said) == 8


@pytest.mark.parametrize(("agent", "column"), [("failing", "agent_failed"), ("slow", "limit_time")])
async def test_the_reward_of_an_agent_that_fails_or_is_ended_is_asked(
    tokenizer: TaskTokenizer, tmp_path: Path, agent: str, column: str
) -> None:
    task = task_of(tokenizer, tmp_path, agent, wall_s=1.0)
    played = await play(task, lambda context: "yes")
    assert played.end.reward == 1.0
    assert played.end.info[column] == 1.0


async def test_an_agent_whose_surroundings_are_away_has_no_reward(tokenizer: TaskTokenizer, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"^task 'buy': the shop is away$"):
        await play(
            MixedTask(tokenizer, 0, {"buy": task_of(tokenizer, tmp_path, "away")}, [1], {}), lambda context: "yes"
        )


async def test_what_outlives_a_coroutine_asks_and_writes_nothing(tokenizer: TaskTokenizer, tmp_path: Path) -> None:
    played = await play(task_of(tokenizer, tmp_path, "lingering", reward="late"), lambda context: "yes")
    assert (played.end.reward, played.end.info["turns"], played.end.info["unread"]) == (0.0, 1, 1.0)


async def test_an_agent_whose_context_is_full_ends_and_is_judged(tokenizer: TaskTokenizer, tmp_path: Path) -> None:
    task = task_of(tokenizer, tmp_path, "completions")
    whole = await play(task, looks_and_talks)
    played = await play(task, looks_and_talks, room=len(whole.contexts[-1]))
    assert played.end.done
    assert played.end.info["agent_failed"] == 1.0, "the SDK raises what the endpoint answers"
    assert played.end.info["turns"] == 3


async def test_episodes_share_a_server_and_no_key_opens_another(tokenizer: TaskTokenizer, tmp_path: Path) -> None:
    from aiohttp import ClientSession

    task = task_of(tokenizer, tmp_path, "completions")
    found = await asyncio.gather(*(play(task, looks_and_talks, index) for index in range(8)))
    assert all(played.samples == 1 and continued(played) for played in found)
    async with ClientSession() as client:
        for key in ("", "0" * 32):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post(f"{task.endpoint.url}/v1/chat/completions", json={}, headers=headers)
            assert answer.status == 410


async def test_a_path_that_is_not_there_is_named_with_those_that_are() -> None:
    from aiohttp import ClientSession

    valid = "POST /v1/chat/completions, POST /v1/responses, POST /v1/messages, POST /v1/messages/count_tokens"
    valid += ", GET /v1/models"
    endpoint = AgentEndpoint()
    await endpoint.start()
    async with ClientSession(endpoint.url) as client:
        answer = await client.post("/v1/embeddings", json={})
        said = (await answer.json())["error"]["message"]
        assert (answer.status, said) == (404, f"POST /v1/embeddings: no such path; valid: {valid}.")
        answer = await client.get("/key/v1/messages", headers={"anthropic-version": "2023-06-01"})
        error = {"type": "not_found_error", "message": f"GET /key/v1/messages: no such path; valid: {valid}."}
        assert await answer.json() == {"type": "error", "error": error}
    await endpoint.stop()


PROGRAM = """
import json, os, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    messages += [ask(messages), {"role": "user", "content": "go on"}]
assert not os.path.exists("/tests")
os.makedirs("tests", exist_ok=True)
open("answer.txt", "w").write(sys.argv[2])
open("/tmp/reward", "w").write("1")
"""


@pytest.mark.parametrize("answer", [42, 7])
async def test_a_program_in_a_box_without_network_is_judged_when_it_is_dead(
    tokenizer: TaskTokenizer, tmp_path: Path, answer: int
) -> None:
    (tmp_path / "hidden").write_text("")
    row = {"prompt": "What is 6 * 7?", "answer": answer, "tests": str(tmp_path)}
    command = [sys.executable, "-IS", "-c", PROGRAM, "{prompt}", "{answer}"]
    task = task_for(tokenizer, tmp_path, row, reward="answer_file", command=command)
    task.check()
    played = await play(task, lambda context: "yes")
    assert (played.end.info["agent_failed"], played.end.info["turns"]) == (0, 2)
    assert "What is 6 * 7?" in played.texts(tokenizer)[0]
    assert played.end.reward == float(answer == 42)


@pytest.mark.parametrize("sandbox", ["auto", "none"])
async def test_a_program_that_is_not_there_is_one_sentence(
    tokenizer: TaskTokenizer, tmp_path: Path, sandbox: str
) -> None:
    given = {"env": {"sandbox": sandbox}}
    task = task_for(tokenizer, tmp_path, {"prompt": "x"}, reward="one", given=given, command=["mini-none"])
    mixed = MixedTask(tokenizer, 0, {"repair": task}, [1], {})
    with pytest.raises(OperationError, match=r"^task 'repair': task\.command = \['mini-none'\]: there is no program"):
        mixed.check()
    episode, tools = mixed.open(0, 0, 0.0), cast(Any, None)
    with pytest.raises(OperationError) as error:
        await episode.start(tools)
    await episode.close("failed")
    before = "task 'repair': task.command = ['mini-none']: it ended without a request (exit code 127): "
    assert str(error.value).startswith(before)
    assert re.fullmatch(r".*mini-none: (No such file or directory|not found)\.", str(error.value).removeprefix(before))


MINI: dict[str, Any] = {"command": ["mini"]}


@pytest.mark.parametrize(
    ("agent", "env", "why"),
    [
        ({}, {}, r"one of task.command and task.agent is the agent"),
        (
            {"command": ["mini", "{repo}"]},
            {},
            r"task.command = '\{repo\}': the rows have no column 'repo'; valid: prompt",
        ),
        (MINI, {"box": ["apptainer-none", "exec"]}, r"env.box = 'apptainer-none': no such program on this node"),
        (
            MINI,
            {"box": ["sh", "-c"], "mounts": ["/opt"]},
            r"env.box = \['sh', '-c'\]: it has no \{mounts\} for env.mounts",
        ),
        ({"agent": f"{AGENTS}:by_openai"}, {}, r"task.agent = .*by_openai': it is no coroutine function"),
    ],
)
def test_mistakes_of_a_command_and_a_box_are_sentences(
    tokenizer: TaskTokenizer, tmp_path: Path, agent: dict[str, Any], env: dict[str, Any], why: str
) -> None:
    data = write_rows(tmp_path, {"prompt": "x"})
    with pytest.raises(UserError, match=why):
        AgentTask(tokenizer, data=data, reward=f"{AGENTS}:one", **agent).make({"env": env}).check()
