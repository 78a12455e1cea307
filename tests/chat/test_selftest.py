"""A model's chat is followed exactly, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.chat.dialects import BridgeError, LibraryDialect, TemplateDialect
from libra_hpc.chat.selftest import USER, choose_dialect
from libra_hpc.errors import UserError
from libra_hpc.tasks.chat_template import ChatTemplate, render_prompt
from libra_hpc.tasks.tokenizer import TaskTokenizer

from .chat_folder import TEMPLATES, write_chat_folder

PLAIN = TEMPLATES["plain"]
JSON_CALLS = PLAIN.replace("<tool_call>\\n{", "{").replace("}\\n</tool_call>", "}").replace("arguments", "parameters")


def choice_of(folder: Path, template: str, model_type: str = "qwen3", tools: bool = True) -> str:
    return choose_dialect(TaskTokenizer(write_chat_folder(folder, template, model_type)), tools).dialect.name


def test_the_library_is_taken_for_the_models_it_knows_else_the_template(tmp_path: Path) -> None:
    assert choice_of(tmp_path, "qwen3") == "qwen3"
    assert choice_of(tmp_path, "qwen3", "qwen2") == "template"
    assert choice_of(tmp_path, "qwen3", "llama") == "template"  # its renderer needs tokens that are missing
    assert choice_of(tmp_path, "llama3", "llama") == "llama-3"
    assert choice_of(tmp_path, TEMPLATES["llama3"].replace("Given the", "Use the"), "llama") == "template"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("You may call one", "Call one"),
        ("'\\n<tool_response>\\n' + ", "'\\n<tool_response>' + "),
        (
            "{{- '<|im_start|>assistant\\n' if add_generation_prompt }}",
            "{{- '<|im_start|>assistant' if add_generation_prompt }}",
        ),
    ],
)
def test_another_template_of_a_known_model_type_is_followed_by_itself(tmp_path: Path, old: str, new: str) -> None:
    assert old in TEMPLATES["qwen3"]
    assert choice_of(tmp_path, TEMPLATES["qwen3"].replace(old, new)) == "template"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("call.function.arguments | tojson", "'{}'", "not write a turn of the assistant before 'tool'"),
        (
            "+ message.content + '<|im_end|>",
            "+ message.content[loop.revindex0:] + '<|im_end|>",
            "before a turn differs",
        ),
        ("{{- '<|im_end|>\\n' }}", "{{- '<|im_end|>' + messages | length | string }}", "later turn differs"),
        ("<tool_call>", "<call>", "tool calls in a form that is not known"),
    ],
)
def test_a_template_that_does_more_than_append_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    assert old in PLAIN
    with pytest.raises(UserError, match=rf"model.path = .*its chat template .*{why}"):
        choice_of(tmp_path, PLAIN.replace(old, new), "qwen2")


def test_a_template_without_system_messages_is_followed(tmp_path: Path) -> None:
    refusing = "{{- raise_exception('no system') if messages[0].role == 'system' }}"
    assert choice_of(tmp_path, refusing + PLAIN, "qwen2") == "template"


def test_a_turn_must_end_with_a_token_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ends the assistant's turn with '\\\\n', which is no token of its own"):
        choice_of(tmp_path, PLAIN.replace("{{- '<|im_end|>\\n' }}", "{{- '\\n' }}"), "qwen2")


def test_calls_as_bare_json_are_read_with_tools_only(tmp_path: Path) -> None:
    tokenizer = TaskTokenizer(write_chat_folder(tmp_path, JSON_CALLS.replace("<tool_call>", ""), "llama"))
    dialect = TemplateDialect(tokenizer, ChatTemplate(tokenizer))
    said = tokenizer.encode('{"name": "look", "parameters": {"thing": "x"}}<|im_end|>')
    (call,) = dialect.parse([], said, [{}]).calls
    assert (call.name, call.arguments, call.error) == ("look", {"thing": "x"}, "")
    assert dialect.parse([], said, []).text.startswith('{"name"')


def test_a_renderer_that_changes_a_sampled_turn_fails_the_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TaskTokenizer(write_chat_folder(tmp_path))
    dialect = LibraryDialect("qwen3", tokenizer, TemplateDialect(tokenizer, ChatTemplate(tokenizer)))
    bridge = dialect._renderer.bridge_to_next_turn

    def trimming(before: list[int], sampled: list[int], *rest: object, **named: object) -> object:
        return bridge(before, [one for one in sampled if one != said[1]], *rest, **named)

    monkeypatch.setattr(dialect._renderer, "bridge_to_next_turn", trimming)
    said = tokenizer.encode("One two three<|im_end|>")
    with pytest.raises(BridgeError, match="renderer 'qwen3' changes tokens of a sampled turn"):
        dialect.delta(tokenizer.encode("<|im_start|>assistant\n"), said, [USER], [])


def test_a_model_without_or_with_a_broken_template_is_one_sentence(tmp_path: Path) -> None:
    (write_chat_folder(tmp_path) / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="the model has no chat template"):
        render_prompt(TaskTokenizer(tmp_path), [USER])
    with pytest.raises(UserError, match="its chat template does not compile"):
        choice_of(tmp_path, "{% if %}")
    with pytest.raises(UserError, match=r"refuses these messages .*only robots"):
        choice_of(tmp_path, "{{ raise_exception('only robots') }}")
