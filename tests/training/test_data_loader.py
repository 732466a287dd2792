from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qwen3conv.converters.errors import PolicyError, SourceError
from qwen3conv.training.data import ChatDataLoader
from qwen3conv.training.data.masking import encode_row

TEMPLATE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1] %}{% if loop.index0 > ns.last %}{{ '<think>' }}"
    "{{ m.content.split('</think>')[0] if '</think>' in m.content else '' }}{{ '</think>' }}{% endif %}{{ answer }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "hm</think>first"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", additional_special_tokens=special, chat_template=TEMPLATE
    )
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


def _loader(folder: Path, source: Path, rank: int = 0, world: int = 1, **config: Any) -> ChatDataLoader:
    made = ChatDataLoader.Config(source=str(source), tokenizer_path=str(folder), **config)
    return ChatDataLoader(made, dp_world_size=world, dp_rank=rank, seq_len=64, local_batch_size=1)


def _texts(path: Path, count: int = 9) -> Path:
    path.write_text("".join(json.dumps({"text": f"{i}" * (10 + i)}) + "\n" for i in range(count)))
    return path


def test_every_assistant_turn_is_trained_and_nothing_else(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokens, trained = encode_row({"messages": CHAT}, "chat", tokenizer)
    assert tokens == tokenizer.apply_chat_template(CHAT, return_dict=False)
    text = tokenizer.decode([t for t, on in zip(tokens, trained, strict=True) if on])
    assert text == "first<|im_end|><think></think>second<|im_end|>"


def test_bad_rows_are_named_by_line_and_skipped_when_asked(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [b'{"text": "good"}', b"\xff", b"{", b'{"messages": [{"role": "user", "content": "x"}]}', b'{"text": ""}']
    rows.append(json.dumps({"text": "x" * 99}).encode())
    path.write_bytes(b"\n".join(rows))
    with pytest.raises(SourceError) as refused:
        _loader(folder, path)
    for line, why in ((2, "UTF-8"), (3, "not JSON"), (4, "no assistant"), (5, "empty"), (6, "100 tokens")):
        assert any(f"rows.jsonl:{line}: " in told and why in told for told in str(refused.value).splitlines())
    assert len(_loader(folder, path, on_bad_row="skip", on_long_row="skip").bad_rows) == 5


def test_packed_positions_restart_and_every_sequence_has_one_shape(folder: Path, tmp_path: Path) -> None:
    batches = list(_loader(folder, _texts(tmp_path / "t.jsonl"), infinite=False))
    assert {b["input"].shape for b, _ in batches} == {(1, 64)}
    assert any((b["positions"] == 0).sum() > 2 for b, _ in batches)


def test_resume_goes_on_with_the_next_sequence(folder: Path, tmp_path: Path) -> None:
    source = _texts(tmp_path / "t.jsonl")
    whole = _loader(folder, source)
    stream = iter(whole)
    for _ in range(2):
        next(stream)
    state = whole.state_dict()
    resumed = _loader(folder, source)
    resumed.load_state_dict(state)
    again = iter(resumed)
    for _ in range(6):
        assert next(stream)[0]["input"].equal(next(again)[0]["input"])
    with pytest.raises(PolicyError, match="exclude_from_loading"):
        _loader(folder, source, world=2).load_state_dict(state)


def test_ranks_read_different_sequences(folder: Path, tmp_path: Path) -> None:
    source = _texts(tmp_path / "t.jsonl")
    seen = [[tuple(b["input"][0].tolist()) for b, _ in _loader(folder, source, r, 2, infinite=False)] for r in (0, 1)]
    assert len(seen[0]) == len(seen[1]) > 0
    assert not set(seen[0]) & set(seen[1])
