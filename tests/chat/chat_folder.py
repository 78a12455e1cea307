"""A chat model's folder without weights, made on the spot: a BPE of our own pages, and a ChatML template with tools.

The template says what Qwen3's says, in other code; ``plain`` leaves out thinking, as Qwen2.5's does; ``llama3`` says
what Llama 3.1's says of tools in the first user message, and one call a turn.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens of their own that decode to text."""

HEAD = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
<|im_start|>system
{{ system + '\\n\\n' if system or messages[0].role == 'system' }}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
{{ '\\n' + tool | tojson }}
{%- endfor %}
{{ '\\n' }}</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ system }}<|im_end|>
{% endif %}
"""
THINKING = """
{%- set last = namespace(user=messages | length - 1) %}
{%- for message in messages %}
{%- if message.role == 'user' and not (message.content.startswith('<tool_response>') and
message.content.endswith('</tool_response>')) %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
"""
BODY = """
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if last is defined and loop.index0 > last.user and (loop.last or message.reasoning_content) %}
{{- '<think>\\n' + (message.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user' if loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""
LLAMA = """
{{- bos_token }}
{%- set first = 1 if messages[0].role == 'system' else 0 %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}
{{- 'Environment: ipython\n' }}
{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n' }}
{{- messages[0].content | trim if first }}
{{- '<|eot_id|>' }}
{%- for message in messages[first:] %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first %}
{{- 'Given the following functions, please respond with a JSON for a function call with its proper arguments ' }}
{{- 'that best answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": ' }}
{{- 'dictionary of argument name and its value}.Do not use variables.\n\n' }}
{%- for tool in tools %}
{{- tool | tojson(indent=4) + '\n\n' }}
{%- endfor %}
{%- endif %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call a turn') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{%- elif message.role == 'tool' %}
{{- message.content | tojson }}
{%- else %}
{{- message.content | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt }}
"""
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
LLAMA_ENDS = ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
XML = (
    HEAD
    + THINKING
    + BODY.replace(
        BODY[BODY.index("{{- '<tool_call>") : BODY.index("\n{%- endfor %}\n{{- '<|im_end|>")],
        """{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}""",
    )
)
"""As Qwen3.5, Qwen3-Coder and Nemotron write calls."""
TEMPLATES = {"qwen3": HEAD + THINKING + BODY, "plain": HEAD + BODY, "llama3": LLAMA, "xml": XML}


@functools.cache
def chat_tokenizer(size: int = 1500) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    digits, text = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, text])  # each digit is a token, as in Qwen
    tokenizer.decoder = decoders.ByteLevel()
    # Text that never changes, by lines: with merged line breaks a prompt in parts would not be that of the whole.
    lines = "\n".join(((ROOT / "LICENSE").read_text(), *TEMPLATES.values())).splitlines()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([AddedToken(one, normalized=False, special=True) for one in SPECIAL])
    tokenizer.add_tokens([AddedToken(one, normalized=False, special=False) for one in MARKS])
    return tokenizer


def write_chat_folder(folder: Path, template: str = "qwen3", model_type: str = "qwen3") -> Path:
    """``template``: a name of `TEMPLATES`, or the text of another."""
    folder.mkdir(parents=True, exist_ok=True)
    text = TEMPLATES.get(template, template)
    ends: tuple[str, ...] = ("<|im_end|>", SPECIAL[0])
    tokenizer, others = chat_tokenizer(), {"pad_token": SPECIAL[0]}
    if LLAMA_TOKENS[1] in text:
        tokenizer, ends, others = Tokenizer.from_str(tokenizer.to_str()), LLAMA_ENDS, {"bos_token": LLAMA_TOKENS[0]}
        added = [AddedToken(one, normalized=False, special=True) for one in (*LLAMA_TOKENS, *LLAMA_ENDS)]
        tokenizer.add_special_tokens(added)
    ids = [tokenizer.token_to_id(one) for one in ends]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": ends[0], **others}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder
