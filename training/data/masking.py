"""Token ids of a row, and which of them the model is trained to predict."""

from __future__ import annotations

from typing import Any, NamedTuple

ROLES = ("system", "user", "assistant", "tool")


class BadRow(ValueError):
    """A row that cannot be trained on; the message says why."""


class Sample(NamedTuple):
    """Token ids of one document and, for each, whether it is trained (both of length L)."""

    tokens: list[int]
    trained: list[bool]


def kind_of(value: dict[str, Any], kind: str) -> str:
    """``kind``, or for ``auto`` what the fields of the row say."""
    if kind != "auto":
        return kind
    return "chat" if "messages" in value else "completion" if "completion" in value else "text"


def encode_row(value: dict[str, Any], kind: str, tokenizer: Any) -> Sample:
    """Encode a row of ``kind`` (``auto``: by its fields).

    Raises:
        BadRow: wrong fields or roles, nothing to train on, or a mask that cannot be made sure.
    """
    kind = kind_of(value, kind)
    if kind == "chat":
        return _chat(value.get("messages"), value.get("tools"), tokenizer)
    names = ("prompt", "completion") if kind == "completion" else ("text",)
    for name in names:
        if not isinstance(value.get(name), str):
            raise BadRow(f"no string field {name!r}")
    last = value[names[-1]]
    if not last:
        raise BadRow(f"{names[-1]} is empty")
    prompt = tokenizer.encode(value["prompt"], add_special_tokens=False) if kind == "completion" else []
    answer = [*tokenizer.encode(last, add_special_tokens=False), tokenizer.eos_token_id]
    return Sample(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def _chat(messages: Any, tools: Any, tokenizer: Any) -> Sample:
    """Mask by rendered prefixes: a turn starts where the prompt before it ends and closes with the first EOS after.

    A template may render what precedes a turn otherwise in the whole: Qwen3's drops what was thought before the last
    question, between the calls of tools of an earlier one too. The start is then where the whole changes with the turn.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRow("messages is empty or no list")
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES or (role == "system" and number):
            raise BadRow(f"message {number}: wrong role {role!r}")
        if tokenizer.eos_token in str(message):
            raise BadRow(f"message {number} contains {tokenizer.eos_token}: the end of a turn would be ambiguous")
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise BadRow("no assistant turn")

    def render(part: list[Any], prompt: bool, **options: bool) -> str:
        try:
            rendered = tokenizer.apply_chat_template(
                part, tools=tools, tokenize=False, add_generation_prompt=prompt, **options
            )
            return str(rendered)
        except Exception as error:  # jinja errors and whatever a template raises
            raise BadRow(f"the chat template refuses the messages: {error}") from error

    text = render(messages, False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    trained = [False] * len(tokens)
    for turn in turns:
        # An answer without reasoning follows an empty think block, which a template that has one (Qwen3's does) puts
        # into the prompt when thinking is off: it is given then, not learned.
        prompts = render(messages[:turn], True), render(messages[:turn], True, enable_thinking=False)
        prefix = max((prompt for prompt in prompts if text.startswith(prompt)), key=len, default=None)
        if prefix is None:
            changed = render([*messages[:turn], _marked(messages[turn]), *messages[turn + 1 :]], False)
            prefix = _before_turn(text, changed, *prompts, render(messages[:turn], False))
        if prefix is None:
            raise BadRow(f"message {turn}: the template renders what precedes it differently in the whole; mask unsure")
        start = next((i for i, (begin, _) in enumerate(offsets) if begin >= len(prefix)), len(tokens))
        if start and offsets[start - 1][1] > len(prefix):
            raise BadRow(f"message {turn}: a token spans the prompt and the answer; mask unsure")
        if tokenizer.eos_token_id not in tokens[start:]:
            raise BadRow(f"message {turn}: no {tokenizer.eos_token} closes the turn; mask unsure")
        end = tokens.index(tokenizer.eos_token_id, start) + 1
        trained[start:end] = [True] * (end - start)
    return Sample(tokens, trained)


_MARK = "\ue000"
"""Of Unicode's private use, so that no text begins with it."""
_THOUGHT = "</think>"
"""What ends reasoning that stands in the content itself (Qwen3's chat templates)."""


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The message with all that it says begun by a mark."""
    changed = {
        **message,
        "content": _THOUGHT.join(_MARK + part for part in (message.get("content") or "").split(_THOUGHT)),
    }
    if message.get("reasoning_content"):
        changed["reasoning_content"] = _MARK + message["reasoning_content"]
    return changed


def _before_turn(text: str, changed: str, prompt: str, without_thinking: str, history: str) -> str | None:
    """``text`` up to the turn by which ``changed`` differs; ``None`` where the template does not open turns alike.

    The turn begins behind the last generation prompt before the first difference, and behind the empty think block that
    a prompt without thinking has.
    """
    opening = prompt.removeprefix(history)
    differs = next((at for at, (ours, theirs) in enumerate(zip(text, changed, strict=False)) if ours != theirs), None)
    if differs is None or not opening or not prompt.startswith(history):
        return None
    start = text.rfind(opening, 0, differs)
    if start < 0:
        return None
    start += len(opening)
    given = without_thinking.removeprefix(prompt) if without_thinking.startswith(prompt) else ""
    return text[: start + len(given)] if given and text.startswith(given, start) else text[:start]
