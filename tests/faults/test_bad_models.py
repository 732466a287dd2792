"""Models that are not whole, or not what their config says: one error that names tensor, layer, expert, projection.

Made from small models that transformers saved, changed with the safetensors library.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from qwen3conv.converters.conversion import carry_out, prepare
from qwen3conv.converters.errors import ConversionError, MappingError, PolicyError, SourceError
from qwen3conv.converters.inspection import inspect
from qwen3conv.converters.policies import Choices
from qwen3conv.tools.cli.main import cli
from tests.faults.kill_at import snapshot
from tests.models import read_tensors, saved_model
from tests.real_checkpoints import read_model, save_dcp, titan_state_dict

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]
Refuse = Callable[..., list[str]]

EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(max(1, torch.Size(shape).numel())).to(dtype)[: torch.Size(shape).numel()].reshape(shape)


@pytest.fixture
def changed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A copy of a saved model, with its tensors and its config changed."""

    def build(variant: str, change: Change = lambda tensors: None, **config: Any) -> Path:
        folder = place / "model"
        shutil.copytree(saved_model(tmp_path_factory, variant), folder)
        tensors = read_tensors(folder)
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        change(tensors)
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return folder

    return build


@pytest.fixture
def refuse(place: Path) -> Refuse:
    """The lines of the one refusal that engine, command line and inspect give alike; nothing is written or changed."""

    def run(
        folder: Path, to: str = "titan", kind: type[ConversionError] = MappingError, whole: bool = False
    ) -> list[str]:
        before = snapshot(place)
        with pytest.raises(kind) as caught:
            carry_out(prepare(folder, place / "out", to))
        text = str(caught.value)
        ran = CliRunner().invoke(cli, ["convert", str(folder), str(place / "out"), "--to", to])
        assert (ran.exit_code, ran.stdout) == (1, "")
        assert ran.stderr == f"Error: {text}\n"
        assert snapshot(place) == before
        report = inspect(folder)
        assert report.complete == whole
        assert whole or report.problems == (text,)
        return text.splitlines()

    return run


def listed(*problems: str) -> list[str]:
    return [f"  - {problem}" for problem in problems]


# -- missing, unknown, mis-shaped --------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["titan", "hf", "hf-fused", "accelerate"])
@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_one_projection_of_one_expert_is_missed(part: str, to: str, changed: Any, refuse: Refuse) -> None:
    name = EXPERT.format(1, 3, part)
    lines = refuse(changed("moe", lambda tensors: tensors.pop(name)), to)
    assert lines[1:] == listed(f"missing: {name} (layer 1, expert 3, {part}_proj)")


@pytest.mark.parametrize("expert", [0, 2, 4])
def test_a_whole_expert_is_missed(expert: int, changed: Any, refuse: Refuse) -> None:
    names = [EXPERT.format(2, expert, part) for part in ("gate", "up", "down")]
    lines = refuse(changed("moe", lambda tensors: [tensors.pop(name) for name in names]))
    parts = zip(names, ("gate", "up", "down"), strict=True)
    assert lines[1:] == listed(*(f"missing: {n} (layer 2, expert {expert}, {p}_proj)" for n, p in parts))


@pytest.mark.parametrize(
    ("variant", "name", "words"),
    [
        ("dense", "model.layers.0.self_attn.q_norm.weight", "layer 0, q_norm"),
        ("dense", "model.layers.2.mlp.down_proj.weight", "layer 2, down_proj"),
        ("dense", "model.norm.weight", "norm"),
        ("dense", "model.embed_tokens.weight", "embed_tokens"),
        ("dense-tied", "model.embed_tokens.weight", "embed_tokens"),
        ("moe", "model.layers.1.mlp.gate.weight", "layer 1, gate"),
        ("moe", "model.layers.1.self_attn.o_proj.weight", "layer 1, o_proj"),
        ("moe-fused", "model.layers.1.mlp.experts.gate_up_proj", "layer 1, all experts, gate_proj, up_proj"),
        ("moe-fused", "model.layers.2.mlp.experts.down_proj", "layer 2, all experts, down_proj"),
    ],
)
def test_any_other_tensor_is_missed(variant: str, name: str, words: str, changed: Any, refuse: Refuse) -> None:
    lines = refuse(changed(variant, lambda tensors: tensors.pop(name)))
    assert lines[1:] == listed(f"missing: {name} ({words})")


@pytest.mark.parametrize("expert", [0, 4], ids=["the-first", "the-last"])
def test_a_gate_of_the_shape_of_a_down_is_named(expert: int, changed: Any, refuse: Refuse) -> None:
    name = EXPERT.format(0, expert, "gate")

    def swap(tensors: Tensors) -> None:
        tensors[name] = tensors[EXPERT.format(0, expert, "down")].clone()

    lines = refuse(changed("moe", swap))
    assert lines[1:] == listed(
        f"wrong shape: {name} (layer 0, expert {expert}, gate_proj): expected [24, 48], found [48, 24]"
    )


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("model.layers.1.mlp.up_proj.weight", (0, 48), "(layer 1, up_proj): expected [100, 48], found [0, 48]"),
        ("model.layers.0.mlp.up_proj.weight", (0, 48), "(layer 0, up_proj): expected [100, 48], found [0, 48]"),
        ("model.layers.1.mlp.up_proj.weight", (4800,), "(layer 1, up_proj): expected [100, 48], found [4800]"),
        ("model.layers.1.mlp.up_proj.weight", (2, 50, 48), "(layer 1, up_proj): expected [100, 48], found [2, 50, 48]"),
        ("model.norm.weight", (), "(norm): expected [48], found []"),
        ("model.norm.weight", (47,), "(norm): expected [48], found [47]"),
    ],
)
def test_a_wrong_shape_is_named(name: str, shape: tuple[int, ...], found: str, changed: Any, refuse: Refuse) -> None:
    lines = refuse(changed("dense", lambda tensors: tensors.update({name: numbers(*shape)})))
    assert lines[1:] == listed(f"wrong shape: {name} {found}")


def test_an_unknown_tensor_is_named(changed: Any, refuse: Refuse) -> None:
    extra = "model.layers.1.mlp.surprise.weight"
    lines = refuse(changed("moe", lambda tensors: tensors.update({extra: numbers(3)})))
    assert lines[1:] == listed(f"unknown: {extra} (layer 1, surprise)")


def test_problems_of_every_kind_are_told_at_once(changed: Any, refuse: Refuse) -> None:
    wrong = "model.layers.2.self_attn.o_proj.weight"

    def change(tensors: Tensors) -> None:
        del tensors[EXPERT.format(1, 3, "up")], tensors["model.layers.0.self_attn.q_norm.weight"]
        tensors[wrong] = numbers(3, 3)
        tensors["model.layers.1.mlp.surprise.weight"] = numbers(2)
        tensors["model.layers.10.mlp.surprise.weight"] = numbers(2)
        tensors["rubbish"] = numbers(2)

    lines = refuse(changed("moe", change))
    assert lines[1:] == listed(
        "missing: model.layers.0.self_attn.q_norm.weight (layer 0, q_norm)",
        f"missing: {EXPERT.format(1, 3, 'up')} (layer 1, expert 3, up_proj)",
        f"wrong shape: {wrong} (layer 2, o_proj): expected [48, 96], found [3, 3]",
        "unknown: model.layers.1.mlp.surprise.weight (layer 1, surprise)",
        "unknown: model.layers.10.mlp.surprise.weight (layer 10, surprise)",
        "unknown: rubbish",
    )


def test_of_very_many_problems_the_number_is_told(changed: Any, refuse: Refuse) -> None:
    lines = refuse(changed("moe", lambda tensors: [tensors.pop(n) for n in list(tensors) if ".experts." in n]))
    assert len(lines) == 22
    assert lines[-1] == "  - and 25 more"


def test_the_dense_tensors_of_one_layer_have_no_place_in_a_moe(changed: Any, refuse: Refuse) -> None:
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("down", "gate", "up")]
    shapes = [(48, 100), (100, 48), (100, 48)]

    def change(tensors: Tensors) -> None:
        tensors |= {name: numbers(*shape) for name, shape in zip(names, shapes, strict=True)}

    lines = refuse(changed("moe", change))
    assert lines[1:] == listed(*(f"unknown: {n} (layer 1, {n.split('.')[4]})" for n in names))


def test_an_expert_has_no_place_in_a_dense_model(changed: Any, refuse: Refuse) -> None:
    name = EXPERT.format(1, 0, "gate")
    lines = refuse(changed("dense", lambda tensors: tensors.update({name: numbers(24, 48)})))
    assert lines[1:] == listed(f"unknown: {name} (layer 1, expert 0, gate_proj)")


# -- the config says otherwise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "key", "value", "first"),
    [
        ("moe", "num_local_experts", 6, "config.json: num_experts: expected 6, found 5"),
        ("moe", "num_local_experts", 4, "config.json: num_experts: expected 4, found 5"),
        ("moe", "moe_intermediate_size", 25, "config.json: moe_intermediate_size: expected 25, found 24"),
        ("dense", "num_hidden_layers", 4, "config.json: num_hidden_layers: expected 4, found 3"),
        ("dense", "num_hidden_layers", 2, "config.json: num_hidden_layers: expected 2, found 3"),
        ("dense", "hidden_size", 64, "config.json: hidden_size: expected 64, found 48"),
        ("dense", "vocab_size", 331, "config.json: vocab_size: expected 331, found 330"),
        ("dense-tied", "vocab_size", 329, "config.json: vocab_size: expected 329, found 330"),
        ("dense", "num_attention_heads", 8, "config.json: num_attention_heads: expected 8, found 6"),
        ("dense", "num_key_value_heads", 3, "config.json: num_key_value_heads: expected 3, found 2"),
        ("dense", "intermediate_size", 99, "config.json: intermediate_size: expected 99, found 100"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_told_with_both_values(
    variant: str, key: str, value: int, first: str, changed: Any, refuse: Refuse
) -> None:
    other: dict[str, Any] = {"layer_types": None} if key == "num_hidden_layers" else {}
    lines = refuse(changed(variant, **{key: value}, **other))
    assert "config.json and the tensors in" in lines[0]
    assert lines[1] == f"  - {first}"
    assert len(lines) > 2  # and which tensors these are
    assert all(
        line.startswith(("  - missing: ", "  - wrong shape: ", "  - unknown: ", "  - and ")) for line in lines[2:]
    )


def test_wrong_norms_are_told_with_the_sizes_they_would_mean(changed: Any, refuse: Refuse) -> None:
    names = [f"model.layers.0.self_attn.{part}_norm.weight" for part in "qk"]
    lines = refuse(changed("dense", lambda tensors: tensors.update({name: numbers(8) for name in names})))
    assert "  - config.json: head_dim: expected 16, found 8" in lines
    assert lines[-2:] == listed(*(f"wrong shape: {n} (layer 0, {n[25:31]}): expected [16], found [8]" for n in names))


def test_a_dense_model_with_the_config_of_a_moe_is_refused(changed: Any, refuse: Refuse, place: Path) -> None:
    folder = changed("dense")
    other = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5}
    more = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "norm_topk_prob": True}
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **other, **more}))
    assert "  - config.json: num_experts: expected 5, found none (the model is dense)" in refuse(folder)


@pytest.mark.parametrize("layers", [0, -1, 2**40, None, "3", True])
def test_a_number_of_layers_that_is_none_is_refused(layers: object, changed: Any, refuse: Refuse) -> None:
    folder = changed("dense", num_hidden_layers=layers, layer_types=None)
    assert any("num_hidden_layers" in line for line in refuse(folder, kind=SourceError))


@pytest.mark.parametrize("keep", [("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"), ()])
def test_a_model_without_layers_is_refused(keep: tuple[str, ...], changed: Any, refuse: Refuse) -> None:
    folder = changed("dense", lambda tensors: [tensors.pop(n) for n in list(tensors) if n not in keep])
    lines = refuse(folder, kind=ConversionError)
    assert "layers.0.input_layernorm" in lines[1] if keep else "no model tensors" in lines[0]


def test_tensors_without_elements_are_refused(changed: Any, refuse: Refuse) -> None:
    lines = refuse(changed("dense", lambda tensors: tensors.update({n: t[:0] for n, t in list(tensors.items())})))
    assert all("wrong shape" in line for line in lines[1:-1])


def test_tensors_of_integers_are_refused(changed: Any, refuse: Refuse) -> None:
    names = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    types = [torch.int8, torch.int64]

    def change(tensors: Tensors) -> None:
        tensors |= {n: tensors[n].to(dtype) for n, dtype in zip(names, types, strict=True)}

    lines = refuse(changed("dense", change), kind=SourceError)
    assert sorted(lines[1:]) == listed(
        f"{names[0]} is I8, expected a floating-point dtype", f"{names[1]} is I64, expected a floating-point dtype"
    )


# -- dtypes ------------------------------------------------------------------------------------------------------------


def test_experts_of_different_dtypes_need_a_choice_to_be_stacked(changed: Any, refuse: Refuse, place: Path) -> None:
    odd = [EXPERT.format(1, 3, "up"), EXPERT.format(2, 0, "down")]
    folder = changed("moe", lambda tensors: tensors.update({name: tensors[name].float() for name in odd}))
    lines = refuse(folder, "titan", PolicyError, whole=True)
    assert "--dtype" in lines[0]
    assert lines[1:] == listed(*(f"{name} is F32, others are BF16" for name in odd))
    carry_out(prepare(folder, place / "as-they-are", "hf"))
    carry_out(prepare(folder, place / "cast", "titan", Choices(dtype="F32")))
    assert {t.dtype for t in read_tensors(place / "as-they-are").values()} == {torch.float32, torch.bfloat16}


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["dense", "moe"])
def test_an_untied_model_without_head_is_refused(variant: str, changed: Any, refuse: Refuse) -> None:
    (line,) = refuse(changed(variant, lambda tensors: tensors.pop("lm_head.weight")))[1:]
    assert line == "  - missing: lm_head.weight (the output head, which only a model with tied embeddings may lack)"


@pytest.mark.parametrize("row", [0, 200, 329])
def test_tied_copies_that_differ_are_refused_with_the_row_and_the_option(
    row: int, changed: Any, refuse: Refuse, place: Path
) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][row, 47] += 1

    folder = changed("dense-tied", change)
    (line,) = refuse(folder, "titan", PolicyError)
    assert f"lm_head.weight and model.embed_tokens.weight differ from row {row} on" in line
    assert "--untie" in line
    carry_out(prepare(folder, place / "untied", "hf", Choices(untie=True)))
    assert json.loads((place / "untied" / "config.json").read_text())["tie_word_embeddings"] is False


# -- files and their index ---------------------------------------------------------------------------------------------


@pytest.fixture
def split(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = place / "model"
    shutil.copytree(saved_model(tmp_path_factory, "moe-sharded"), folder)
    return folder


def parts_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_a_tensor_in_two_files_is_refused(split: Path, refuse: Refuse) -> None:
    first, second, *_ = parts_of(split)
    tensors = read_tensors_of(first)
    name = sorted(tensors)[0]
    save_file({**read_tensors_of(second), name: tensors[name]}, second, {"format": "pt"})
    lines = refuse(split, kind=SourceError)
    assert lines[1:] == listed(f"{second.name}: holds {name!r} too, which the index places in {first.name}")


def read_tensors_of(path: Path) -> Tensors:
    from safetensors.torch import load_file

    return load_file(path)


def test_every_damage_to_files_and_index_is_told_at_once(split: Path, refuse: Refuse) -> None:
    first, second, third, fourth, *_ = parts_of(split)
    raw = third.read_bytes()
    first.unlink()
    second.write_bytes(second.read_bytes()[:-10])
    third.write_bytes(raw + b"more")
    fourth.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    text = "\n".join(refuse(split, kind=SourceError))
    for path, found in ((first, "does not exist"), (second, "truncated"), (third, "too long"), (fourth, "Git LFS")):
        assert any(path.name in line and found in line for line in text.splitlines()), text


def test_parts_without_their_index_are_refused(split: Path, refuse: Refuse) -> None:
    (split / "model.safetensors.index.json").unlink()
    assert "index" in "".join(refuse(split, kind=SourceError))


def test_an_index_without_its_parts_is_refused(split: Path, refuse: Refuse) -> None:
    for path in parts_of(split):
        path.unlink()
    assert "does not exist" in "".join(refuse(split, kind=SourceError))


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors", ".."])
def test_an_index_that_leads_out_of_the_folder_is_refused(file: str, split: Path, refuse: Refuse) -> None:
    path = split / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))
    assert repr(file) in "".join(refuse(split, kind=SourceError))


# -- DCP ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dcp(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Change], Path]:
    """A DCP that torch saved, its tensors changed before, with the config beside it."""

    def build(change: Change, variant: str = "moe") -> Path:
        source = saved_model(tmp_path_factory, variant)
        tensors, config = read_model(source)
        state = titan_state_dict("T7", tensors, config)
        change(state)
        save_dcp(state, place / "dcp")
        (place / "dcp" / "hf_assets").mkdir()
        shutil.copy(source / "config.json", place / "dcp" / "hf_assets")
        return place / "dcp"

    return build


STACK = "layers.{}.moe.routed_experts.inner_experts.{}"


def dcp_cases() -> Iterator[tuple[str, Change, str]]:
    w1, w2 = STACK.format(1, "w1_EFD"), STACK.format(2, "w2_EDF")
    yield "a stack", lambda t: t.pop(w1), f"missing: {w1} (layer 1, all experts, gate_proj)"
    yield (
        "an expert of a stack",
        lambda t: t.update({w2: t[w2][:-1].clone()}),
        f"wrong shape: {w2} (layer 2, all experts, down_proj): expected [5, 48, 24], found [4, 48, 24]",
    )
    yield (
        "an expert of the first stack",
        lambda t: t.update({STACK.format(0, "w1_EFD"): t[STACK.format(0, "w1_EFD")][:-1].clone()}),
        f"wrong shape: {STACK.format(0, 'w1_EFD')} (layer 0, all experts, gate_proj): "
        "expected [5, 24, 48], found [4, 24, 48]",
    )
    router = "layers.1.moe.router.gate.weight"
    yield "a router", lambda t: t.pop(router), f"missing: {router} (layer 1, gate)"
    key = "layers.0.attention.qkv_linear.wk.weight"
    yield "a key", lambda t: t.pop(key), f"missing: {key} (layer 0, k_proj)"
    yield (
        "the head",
        lambda t: t.pop("lm_head.weight"),
        "missing: lm_head.weight (the output head, which only a model with tied embeddings may lack)",
    )
    extra = "layers.1.moe.surprise"
    yield "an unknown one", lambda t: t.update({extra: numbers(2)}), f"unknown: {extra} (layer 1, moe.surprise)"


@pytest.mark.parametrize(("change", "line"), [pytest.param(c, line, id=name) for name, c, line in dcp_cases()])
def test_a_dcp_that_lacks_or_bends_something_is_refused_by_its_name(
    change: Change, line: str, dcp: Any, refuse: Refuse
) -> None:
    assert refuse(dcp(change), "hf")[-1:] == listed(line)


def test_a_dcp_of_different_dtypes_in_one_stack_cannot_be_but_norms_may_differ(dcp: Any, place: Path) -> None:
    folder = dcp(lambda t: t.update({"norm.weight": t["norm.weight"].float()}))
    carry_out(prepare(folder, place / "out", "hf"))
    assert read_tensors(place / "out")["model.norm.weight"].dtype == torch.float32


def test_a_routing_bias_that_is_not_zero_is_refused_with_its_size(dcp: Any, refuse: Refuse) -> None:
    folder = dcp(lambda t: t["layers.1.moe.expert_bias_E"].fill_(0.5))
    (line,) = refuse(folder, "hf", PolicyError, whole=True)
    assert "layer 1" in line
    assert "0.5" in line
    assert "--drop-expert-bias" in line


def test_a_dcp_without_metadata_is_refused(dcp: Any, refuse: Refuse) -> None:
    folder = dcp(lambda t: None)
    (folder / ".metadata").unlink()
    assert "no .metadata" in "".join(refuse(folder, "hf", SourceError))
    (folder / ".metadata.tmp").touch()
    assert "interrupted" in "".join(refuse(folder, "hf", SourceError))


def test_a_dcp_without_a_data_file_is_refused(dcp: Any, refuse: Refuse) -> None:
    folder = dcp(lambda t: None)
    for path in folder.glob("*.distcp"):
        path.unlink()
    assert "__0_0.distcp" in "".join(refuse(folder, "hf", SourceError))
