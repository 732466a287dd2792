from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qwen3conv.converters.errors import PolicyError, SourceError
from qwen3conv.training.data import encoded
from qwen3conv.training.data.loader import ChatDataLoader
from qwen3conv.training.data.masking import encode_row
from qwen3conv.training.titan import IGNORE_INDEX

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
    rows.append(json.dumps({"prompt": "x", "completion": "x" * 98}).encode())
    path.write_bytes(b"\n".join(rows))
    with pytest.raises(SourceError) as refused:
        _loader(folder, path)
    for line, why in ((2, "UTF-8"), (3, "not JSON"), (4, "no assistant"), (5, "empty"), (6, "100 tokens")):
        assert any(f"rows.jsonl:{line}: " in told and why in told for told in str(refused.value).splitlines())
    assert len(_loader(folder, path, on_bad_row="skip", on_long_row="skip").bad_rows) == 5


def test_an_empty_think_block_is_given_and_reasoning_is_learned(folder: Path) -> None:
    """With thinking off the template puts the empty block into the prompt, as Qwen3's does."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ '<|im_start|>assistant\n' }}{% endif %}",
        "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}",
    )
    for answer, learned in (("second", "second"), ("why</think>second", "<think>why</think>second")):
        chat = [*CHAT[:-1], {"role": "assistant", "content": answer}]
        tokens, trained = encode_row({"messages": chat}, "chat", tokenizer)
        text = tokenizer.decode([t for t, on in zip(tokens, trained, strict=True) if on])
        assert text == f"first<|im_end|>{learned}<|im_end|>"


def test_tool_calls_and_their_answers_are_no_prompt_of_each_other(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    turns = [("user", "sum?"), ("assistant", "call"), ("tool", "3"), ("assistant", "it is 3")]
    chat = [{"role": role, "content": content} for role, content in turns]
    tokens, trained = encode_row({"messages": chat, "tools": None}, "chat", tokenizer)
    text = tokenizer.decode([t for t, on in zip(tokens, trained, strict=True) if on])
    assert text == "<think></think>call<|im_end|><think></think>it is 3<|im_end|>"


@given(
    lengths=st.lists(st.integers(1, 200), min_size=4, max_size=20),
    world=st.sampled_from([1, 2]),
    packing=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_every_token_of_every_text_is_predicted_once_an_epoch(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, lengths: list[int], world: int, packing: bool
) -> None:
    path = tmp_path_factory.mktemp("law") / "t.jsonl"
    texts = ["".join(chr(97 + (i * 7 + j) % 26) for j in range(length)) for i, length in enumerate(lengths)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found: Counter[int] = Counter()
    sequences = 0
    for rank in range(world):
        loader = _loader(folder, path, rank, world, packing=packing, infinite=False)
        for inputs, labels in loader:
            sequences += 1
            assert inputs["input"].shape == labels.shape == (1, 64)
            kept = labels[labels != IGNORE_INDEX]
            assert (inputs["positions"][labels != IGNORE_INDEX] >= 0).all()
            found.update(kept.tolist())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = Counter(token for text in texts for token in [*tokenizer.encode(text)[1:], tokenizer.eos_token_id])
    missing = expected - found
    assert not found - expected
    if world == 1:
        assert not missing
    else:  # what does not make a sequence for every rank is left
        assert missing.total() <= 64


def test_ranks_of_a_machine_share_what_is_encoded_once(folder: Path, tmp_path: Path) -> None:
    source, cache = _texts(tmp_path / "t.jsonl"), tmp_path / "cache"
    first = _loader(folder, source, 0, 2, cache=str(cache))
    (made,) = cache.iterdir()
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    second = _loader(folder, source, 1, 2, cache=str(cache))
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before
    assert first.dataset.rows.digest == second.dataset.rows.digest
    _texts(source, 8)
    _loader(folder, source, cache=str(cache))
    assert len([*cache.iterdir()]) == 2


def go_on(loader: ChatDataLoader, state: Any) -> None:
    loader.load_state_dict(state)
    next(iter(loader))


def test_a_run_does_not_go_on_in_other_data(folder: Path, tmp_path: Path) -> None:
    source = _texts(tmp_path / "t.jsonl")
    loader = _loader(folder, source)
    next(iter(loader))
    state = loader.state_dict()
    _texts(source, 8)
    changed = _loader(folder, source)
    with pytest.raises(PolicyError, match=r"others than when the run was saved(.|\n)*exclude_from_loading dataloader"):
        go_on(changed, state)


def test_a_run_does_not_go_on_with_rows_packed_otherwise(folder: Path, tmp_path: Path) -> None:
    source = _texts(tmp_path / "t.jsonl")
    loader = _loader(folder, source, packing=True)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(PolicyError, match=r"with packing(.|\n)*exclude_from_loading dataloader"):
        go_on(_loader(folder, source, packing=False), state)


def test_machines_that_share_a_disk_may_encode_the_same_rows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine is done while this one encodes: its rows are taken, and nothing is left beside them."""
    source, cache = _texts(tmp_path / "t.jsonl"), tmp_path / "cache"
    expected = [b["input"].tolist() for b, _ in _loader(folder, source, cache=str(cache), infinite=False)]
    (made,) = cache.iterdir()
    made.rename(tmp_path / "theirs")
    samples = encoded._samples

    def overtaken(*given: Any) -> Any:
        yield from samples(*given)
        (tmp_path / "theirs").rename(made)

    monkeypatch.setattr(encoded, "_samples", overtaken)
    late = _loader(folder, source, cache=str(cache), infinite=False)
    assert [b["input"].tolist() for b, _ in late] == expected
    assert [*cache.iterdir()] == [made]


def test_parquet_and_folders_are_read_as_json_lines_are(folder: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    source = _texts(tmp_path / "t.jsonl")
    Dataset.from_list([json.loads(line) for line in source.read_text().splitlines()]).to_parquet(tmp_path / "t.parquet")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.parquet").write_bytes((tmp_path / "t.parquet").read_bytes())
    expected = [b["input"].tolist() for b, _ in _loader(folder, source, infinite=False)]
    for other in (tmp_path / "t.parquet", tmp_path / "set"):
        assert [b["input"].tolist() for b, _ in _loader(folder, other, infinite=False)] == expected
    with pytest.raises(SourceError, match="cannot be loaded"):
        _loader(folder, tmp_path / "absent")


def test_too_few_rows_for_a_batch_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="fewer than the 1 of a batch: add rows"):
        _loader(folder, _texts(tmp_path / "t.jsonl", 1), 0, 2, infinite=False)


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
    three = _loader(folder, source, world=3)
    with pytest.raises(PolicyError, match=r"2 sequences of this epoch were read, which 3(.|\n)*exclude_from_loading"):
        three.load_state_dict(state)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 1), (4, 2)])
def test_another_number_of_ranks_goes_on_with_the_same_sequences_at_every_step(
    before: int, after: int, folder: Path, tmp_path: Path
) -> None:
    """Four sequences a step, however many ranks read them."""
    source = tmp_path / "t.jsonl"
    source.write_text("".join(json.dumps({"text": f"{number:>40}"}) + "\n" for number in range(24)))

    def step(streams: list[Any], world: int) -> list[list[int]]:
        return sorted(next(stream)[0]["input"][0].tolist() for _ in range(4 // world) for stream in streams)

    loaders = [_loader(folder, source, rank, before, packing=False) for rank in range(before)]
    streams = [iter(loader) for loader in loaders]
    step(streams, before)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    others = [_loader(folder, source, rank, after, packing=False) for rank in range(after)]
    for loader in others:
        loader.load_state_dict(states[0])
    moved = [iter(loader) for loader in others]
    for _ in range(8):  # into the next epoch
        assert step(moved, after) == step(streams, before)


def test_ranks_read_different_sequences(folder: Path, tmp_path: Path) -> None:
    source = _texts(tmp_path / "t.jsonl")
    seen = [[tuple(b["input"][0].tolist()) for b, _ in _loader(folder, source, r, 2, infinite=False)] for r in (0, 1)]
    assert len(seen[0]) == len(seen[1]) > 0
    assert not set(seen[0]) & set(seen[1])
