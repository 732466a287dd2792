"""Loss on the answers alone, with a template of Qwen3's kind: think blocks, tool calls, tool answers in user turns.

What is an answer is found here in another way than the loader finds it: in the rendered text, by its marks.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from qwen3conv.training.data.masking import encode_row
from tests.models import make_tokenizer

TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {{- 'Functions:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set at = namespace(asked=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {%- set thought = m.reasoning_content or '' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > at.asked and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
EMPTY = "<think>\n\n</think>\n\n"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    found = AutoTokenizer.from_pretrained(folder)
    found.chat_template = TEMPLATE
    return found


def learned(row: dict[str, Any], tokenizer: Any) -> tuple[str, list[str]]:
    """The text of all tokens of the row, and of each run of trained ones."""
    tokens, trained = encode_row(row, "auto", tokenizer)
    runs: list[list[int]] = []
    for at, (token, on) in enumerate(zip(tokens, trained, strict=True)):
        if on and (at == 0 or not trained[at - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return tokenizer.decode(tokens), [tokenizer.decode(run) for run in runs]


def answers(text: str) -> list[str]:
    """What stands between the mark of an assistant turn and its end, end included, without an empty think block."""
    found = re.findall(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)
    return [answer.removeprefix(EMPTY) for answer in found]


def test_reasoning_is_learned_where_the_template_keeps_it(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "the sun?"},
        {"role": "assistant", "content": "a star", "reasoning_content": "it shines"},
        {"role": "user", "content": "the moon?"},
        {"role": "assistant", "content": "a stone", "reasoning_content": "it does not"},
    ]
    text, runs = learned({"messages": chat}, tokenizer)
    assert "it shines" not in text  # Qwen3 forgets what was thought before the last question
    assert runs == ["a star<|im_end|>", "<think>\nit does not\n</think>\n\na stone<|im_end|>"]


def test_an_answer_without_reasoning_is_given_its_empty_block(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "the sun?"}, {"role": "assistant", "content": "a star"}]
    text, runs = learned({"messages": chat}, tokenizer)
    assert EMPTY in text
    assert runs == ["a star<|im_end|>"]


def test_calls_are_learned_and_their_answers_and_the_functions_are_not(tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one and two?"},
        {"role": "assistant", "content": "", "reasoning_content": "I add", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "three"},
        {"role": "assistant", "content": "it is 3"},
    ]
    text, runs = learned({"messages": chat, "tools": TOOLS}, tokenizer)
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert runs == [f"<think>\nI add\n</think>\n\n{call * 2}<|im_end|>", "it is 3<|im_end|>"]
    for given_only in ("be brief", "<tools>", "<tool_response>\n3", "<tool_response>\nthree"):
        assert given_only in text
        assert not any(given_only in run for run in runs)


def test_calls_of_an_earlier_question_are_learned_without_what_was_thought(tokenizer: Any) -> None:
    """Alone, what precedes the second answer still has the thought that the whole drops."""
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "one and two?"},
        {"role": "assistant", "content": "", "reasoning_content": "I add", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "it is 3"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes", "reasoning_content": "I am"},
    ]
    text, runs = learned({"messages": chat}, tokenizer)
    assert "I add" not in text
    assert runs == answers(text)
    assert runs[1:] == ["it is 3<|im_end|>", "<think>\nI am\n</think>\n\nyes<|im_end|>"]
    in_content = [*chat[:3], {"role": "assistant", "content": "hm</think>it is 3"}, *chat[4:]]
    tokenizer = with_thoughts_in_content(tokenizer)
    text, runs = learned({"messages": in_content}, tokenizer)
    assert runs[1] == "it is 3<|im_end|>"


def with_thoughts_in_content(tokenizer: Any) -> Any:
    """Whose template takes what precedes ``</think>`` in the content for reasoning, as Qwen3's does."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = TEMPLATE.replace("m.content or ''", "(m.content or '').split('</think>')[-1]")
    return changed


WORDS = st.text(st.sampled_from("sun mon\n.?{}<>/|\u00e9\u4e16\U0001f600"), min_size=1, max_size=12).map(
    lambda text: f"x{text}"
)
"""Letters, marks of templates and characters of several bytes; no blank first, which could merge with the prompt's."""


def turns(question: str, steps: list[tuple[str, str]], answer: str, thought: str) -> list[dict[str, Any]]:
    """A question, calls with what was thought and what came back, and the answer."""
    made: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for reason, came_back in steps:
        made.append({"role": "assistant", "content": "", "reasoning_content": reason, "tool_calls": [CALL]})
        made.append({"role": "tool", "content": came_back})
    return [*made, {"role": "assistant", "content": answer, "reasoning_content": thought}]


ROUNDS = st.builds(
    turns, WORDS, st.lists(st.tuples(st.just("") | WORDS, WORDS), max_size=2), WORDS, st.just("") | WORDS
)


@given(rounds=st.lists(ROUNDS, min_size=1, max_size=3), system=st.none() | WORDS, tools=st.sampled_from([None, TOOLS]))
@settings(max_examples=200)
def test_the_mask_covers_exactly_the_tokens_of_the_answers(
    tokenizer: Any, rounds: list[list[dict[str, Any]]], system: str | None, tools: list[Any] | None
) -> None:
    chat = [message for one in rounds for message in one]
    if system is not None:
        chat.insert(0, {"role": "system", "content": system})
    row = {"messages": chat, "tools": tools}
    text, runs = learned(row, tokenizer)
    assert text == tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
    assert runs == answers(text)
    assert len(runs) == sum(message["role"] == "assistant" for message in chat)
