"""``parity``, judged on checkpoints that the real libraries wrote.

Hugging Face folders come from transformers' ``save_pretrained``; DCP folders from torchtitan's
``Qwen3StateDictAdapter`` and ``torch.distributed.checkpoint.save``, so that our own converter has no part in them.

Measured in fp32 with torch 2.13.0 (CPU), transformers 5.24.0 and torchtitan 0.3.0, logits up to about 3 in magnitude,
as largest difference of any logit: dense untied 1.9e-6, tied 2.1e-6; MoE 1.3e-6, without normalized top-k 0.8e-6.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from qwen3conv.converters.config import read_config
from qwen3conv.converters.errors import ConversionError, MappingError, PolicyError, SourceError, VerifyError
from qwen3conv.tools import parity
from qwen3conv.tools.parity import compare, compute
from qwen3conv.training import devices
from qwen3conv.training.devices import MissingPackageError, choose_device, prepare_torchtitan

DENSE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {**DENSE, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "untied": DENSE,
    "tied": {**DENSE, "tie_word_embeddings": True},
    "moe": {**MOE, "norm_topk_prob": True},
    "moe-unnormalized": {**MOE, "norm_topk_prob": False},
}
GATE, UP = "layers.1.feed_forward.w1.weight", "layers.1.feed_forward.w3.weight"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

State = dict[str, torch.Tensor]
Make = Callable[[str], tuple[Path, Path]]
"""From a key of KINDS to a Hugging Face folder and a DCP folder of the same weights; made once, not to be changed."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, tuple[Path, Path]] = {}

    def make(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            write_hf(root / "hf", KINDS[kind])
            write_dcp(root / "dcp", titan_state(root / "hf"), root / "hf")
            made[kind] = (root / "hf", root / "dcp")
        return made[kind]

    return make


def write_hf(folder: Path, settings: dict[str, Any], **options: Any) -> None:
    """Save a random Qwen3, dense or MoE: norms between 0.5 and 1.5, wide weights, so that every swap shows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if "num_experts" in settings:
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=0.12, generator=generator)
    model.save_pretrained(folder, **options)


def titan_state(hf: Path) -> State:
    """The weights of ``hf`` under torchtitan's names, by torchtitan's adapter, with its routing biases at zero."""
    prepare_torchtitan()
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3 import Qwen3StateDictAdapter

    from qwen3conv.training.native_model import native_config

    settings = native_config(read_config(hf), max_seq_len=8, inner_attention=ScaledDotProductAttention.Config())
    state: State = Qwen3StateDictAdapter(settings, None).from_hf(load_file(hf / "model.safetensors"))
    for name in [name for name in state if name.endswith("router.gate.weight")]:
        bias = name.removesuffix("router.gate.weight") + "expert_bias_E"
        state[bias] = torch.zeros(state[name].shape[0])
    return state


def write_dcp(folder: Path, state: dict[str, Any], hf: Path) -> Path:
    """Save ``state`` with torch's writer, and the config.json of ``hf`` in hf_assets, as our converter does."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "hf_assets").mkdir()
    shutil.copy(hf / "config.json", folder / "hf_assets")
    return folder


def changed_config(hf: Path, folder: Path, **changes: Any) -> Path:
    """The config.json of ``hf`` with ``changes``, in ``folder``."""
    settings = json.loads((hf / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))
    return folder


# -- the libraries agree -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_dense_logits_of_transformers_and_torchtitan_agree(kind: str, pair: Make) -> None:
    report = compare(*pair(kind))
    assert [side.implementation for side in report.sides] == ["transformers", "torchtitan"]
    assert report.max_abs < 1e-5
    assert report.kl < 1e-9
    assert (report.top1, report.first_divergence, report.agrees) == (1.0, None, True)
    places = [difference.place for difference in report.per_layer]
    assert places == ["embeddings", "layer 0", "layer 1", "layer 2", "final norm", "logits"]
    assert report.tokens == (2, 64)


@pytest.mark.parametrize("kind", ["moe", "moe-unnormalized"])
def test_moe_logits_agree_with_experts_in_fp32_and_top_k_normalized_as_configured(kind: str, pair: Make) -> None:
    report = compare(*pair(kind))
    assert report.sides[1].experts == "float32 reference"
    assert report.max_abs < 1e-5
    assert (report.top1, report.first_divergence) == (1.0, None)


def test_fused_and_per_expert_hugging_face_folders_compute_the_same_bits(pair: Make, tmp_path: Path) -> None:
    write_hf(tmp_path, KINDS["moe"], save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    report = compare(pair("moe")[0], tmp_path)
    assert (report.max_abs, report.first_divergence, report.kl) == (0.0, None, 0.0)


def test_bfloat16_stays_within_its_tolerance_and_uses_torchtitans_own_experts(pair: Make) -> None:
    report = compare(*pair("moe"), dtype="bfloat16")
    assert report.sides[1].experts == "torchtitan's bfloat16 grouped_mm"
    assert report.first_divergence is None
    assert 1e-3 < report.max_abs < 0.25  # measured 0.06


def test_compute_gives_the_logits_of_transformers(pair: Make) -> None:
    from transformers import AutoModelForCausalLM

    hf, native = pair("untied")
    ids = [[1, 2, 3, 5, 8], [13, 21, 34, 55, 89]]
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)(torch.tensor(ids)).logits
    for folder in (hf, native):
        run = compute(folder, ids)
        torch.testing.assert_close(run.logits, expected, atol=1e-5, rtol=0)
        assert run.states["layer 2"].shape == (2, 5, 32)


def test_a_prompt_is_encoded_by_the_tokenizer_of_either_folder(pair: Make, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    hf, native = pair("untied")
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        compare(hf, native, prompt="a b")
    words = Tokenizer(models.WordLevel({"?": 0, "moon": 7, "river": 11, "stone": 95}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    shutil.copytree(native, tmp_path / "dcp")
    words.save(str(tmp_path / "dcp" / "hf_assets" / "tokenizer.json"))
    report = compare(hf, tmp_path / "dcp", prompt="river moon stone river")
    assert (report.tokens, report.first_divergence) == ((1, 4), None)


def test_the_report_is_json_with_the_promised_keys(pair: Make) -> None:
    report = json.loads(json.dumps(compare(*pair("untied"), tokens=4).to_json()))
    assert {"max_abs", "kl", "top1", "first_divergence", "per_layer", "sides"} <= report.keys()
    assert report["per_layer"][1]["place"] == "layer 0"


# -- differences are found ---------------------------------------------------------------------------------------------


def test_swapped_gate_and_up_are_found_in_their_layer(pair: Make, tmp_path: Path) -> None:
    hf, _ = pair("untied")
    state = titan_state(hf)
    state[GATE], state[UP] = state[UP], state[GATE]
    report = compare(hf, write_dcp(tmp_path / "dcp", state, hf))
    assert report.first_divergence == "layer 1"
    assert report.top1 < 1
    assert report.kl > 1e-3
    assert [difference.relative <= report.tolerance for difference in report.per_layer] == [True] * 2 + [False] * 4


@pytest.mark.parametrize(
    ("kind", "changes", "difference"),
    [
        (
            "untied",
            {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
            "rope_theta: 1000000.0 and 5000000.0",
        ),
        ("untied", {"rms_norm_eps": 1e-2}, "rms_norm_eps: 1e-06 and 0.01"),
        ("moe", {"norm_topk_prob": False}, "norm_topk_prob: True and False"),
        ("moe", {"num_experts_per_tok": 3}, "num_experts_per_tok: 2 and 3"),
    ],
)
def test_a_config_that_computes_something_else_is_found_and_named(
    kind: str, changes: dict[str, Any], difference: str, pair: Make, tmp_path: Path
) -> None:
    hf, native = pair(kind)
    report = compare(hf, native, config_b=changed_config(hf, tmp_path / "other", **changes))
    assert report.first_divergence == "layer 0"
    assert report.config_differences == (difference,)


def test_a_trained_routing_bias_is_found_and_named(pair: Make, tmp_path: Path) -> None:
    hf, _ = pair("moe")
    state = titan_state(hf)
    state["layers.1.moe.expert_bias_E"][4] = 0.5
    report = compare(hf, write_dcp(tmp_path / "dcp", state, hf))
    assert report.first_divergence == "layer 1"
    assert report.sides[1].notes == ("expert_bias_E reaches 0.5; a Hugging Face model has no such term",)


@pytest.mark.parametrize("order", ["transformers first", "torchtitan first"])
def test_routing_ties_are_decided_alike_and_counted_and_real_differences_are_not(
    order: str, pair: Make, tmp_path: Path
) -> None:
    """Experts 0 and 1 of a layer tie for every token; a nudge of 1e-5 turns choices, one of 5e-2 is another model."""
    hf = tmp_path / "hf"
    shutil.copytree(pair("moe")[0], hf)
    weights, gate = load_file(hf / "model.safetensors"), "model.layers.1.mlp.gate.weight"
    weights[gate][1] = weights[gate][0]
    save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    found = {}
    for nudge in (1e-5, 5e-2):
        state = titan_state(hf)
        state["layers.1.moe.router.gate.weight"][1] *= 1 + nudge
        native = write_dcp(tmp_path / f"dcp-{nudge}", state, hf)
        found[nudge] = compare(hf, native) if order == "transformers first" else compare(native, hf)
    assert found[1e-5].first_divergence is None
    assert found[5e-2].first_divergence == "layer 1"
    assert found[5e-2].per_layer[2].relative > 0.1  # tokens that went elsewhere; without them it is 0.004
    assert 0 < found[5e-2].routing_ties < found[1e-5].routing_ties


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_missing_surplus_and_misshapen_dcp_tensors_are_listed_together(pair: Make, tmp_path: Path) -> None:
    hf, _ = pair("untied")
    state = titan_state(hf)
    del state["layers.2.attention.k_norm.weight"]
    state["layers.3.ffn_norm.weight"] = torch.ones(32)
    state["norm.weight"] = torch.ones(33)
    state["train_state.step"] = torch.tensor(7)
    with pytest.raises(MappingError) as error:
        compare(hf, write_dcp(tmp_path / "dcp", state, hf))
    assert [line for line in str(error.value).splitlines() if line.startswith("  - ")] == [
        "  - missing: layers.2.attention.k_norm.weight",
        "  - norm.weight: stored (33,), the config asks for (32,)",
        "  - no such parameter in the model: layers.3.ffn_norm.weight",
    ]


def test_an_older_torchtitan_schema_is_sent_to_upgrade(pair: Make, tmp_path: Path) -> None:
    hf, _ = pair("moe")
    state = {name.replace("moe.routed_experts.inner_", "moe."): tensor for name, tensor in titan_state(hf).items()}
    with pytest.raises(MappingError, match="qwen3conv upgrade SRC DST"):
        compare(hf, write_dcp(tmp_path / "dcp", state, hf))


def test_a_hugging_face_folder_with_a_missing_tensor_is_refused_not_filled_with_random_numbers(
    pair: Make, tmp_path: Path
) -> None:
    hf, native = pair("untied")
    shutil.copytree(hf, tmp_path / "hf")
    weights = load_file(hf / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"], weights["lm_head.weight"]
    weights["model.norm.weight"] = torch.ones(33)
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MappingError) as error:
        compare(tmp_path / "hf", native)
    assert [line for line in str(error.value).splitlines() if line.startswith("  - ")] == [
        "  - missing: lm_head.weight",
        "  - missing: model.layers.1.mlp.up_proj.weight",
        "  - model.norm.weight: stored (33,), the config asks for (32,)",
    ]


def test_tied_copies_that_differ_are_refused_on_either_side(pair: Make, tmp_path: Path) -> None:
    hf, native = pair("tied")
    state = titan_state(hf)
    state["lm_head.weight"] = state["tok_embeddings.weight"].clone()
    state["lm_head.weight"][5, 5] += 1
    with pytest.raises(SourceError, match=r"tok_embeddings\.weight and lm_head\.weight differ"):
        compare(hf, write_dcp(tmp_path / "dcp", state, hf))
    shutil.copytree(hf, tmp_path / "hf")
    weights = load_file(hf / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"lm_head\.weight is stored and differs"):
        compare(tmp_path / "hf", native)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def test_hostile_pickles_are_refused_before_they_run(pair: Make, tmp_path: Path) -> None:
    hf, native = pair("untied")
    target = tmp_path / "ran"
    shutil.copytree(native, tmp_path / "metadata")
    (tmp_path / "metadata" / ".metadata").write_bytes(pickle.dumps(Bomb(target)))
    with pytest.raises(SourceError):
        compare(hf, tmp_path / "metadata")
    # A parameter that is stored as an object: torch would unpickle it without restriction.
    objects = write_dcp(tmp_path / "objects", {**titan_state(hf), "norm.weight": Bomb(target)}, hf)
    with pytest.raises(MappingError, match=r"missing: norm\.weight"):
        compare(hf, objects)
    assert not target.exists()
    dcp.load({"norm.weight": torch.ones(32)}, checkpoint_id=objects, no_dist=True)
    assert target.exists(), "the bomb works"


def test_a_dcp_with_a_hole_is_refused_not_filled_with_what_memory_held(pair: Make, tmp_path: Path) -> None:
    hf, native = pair("untied")
    shutil.copytree(native, tmp_path / "dcp")
    metadata = dcp.FileSystemReader(native).read_metadata()
    gate = metadata.state_dict_metadata[GATE]
    assert isinstance(gate, TensorStorageMetadata)
    gate.chunks.clear()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    with pytest.raises(SourceError, match=GATE):
        compare(hf, tmp_path / "dcp")


def test_a_dcp_with_a_missing_or_cut_data_file_is_refused(pair: Make, tmp_path: Path) -> None:
    hf, native = pair("untied")
    shutil.copytree(native, tmp_path / "dcp")
    data = tmp_path / "dcp" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-5000])
    with pytest.raises(SourceError):
        compare(hf, tmp_path / "dcp")
    data.unlink()
    with pytest.raises(SourceError):
        compare(hf, tmp_path / "dcp")


def test_a_side_that_computes_nan_is_refused_with_the_place(pair: Make, tmp_path: Path) -> None:
    hf, _ = pair("untied")
    state = titan_state(hf)
    state["layers.2.ffn_norm.weight"] = torch.full((32,), float("nan"))
    with pytest.raises(VerifyError, match="layer 2 holds infinities or NaN"):
        compare(hf, write_dcp(tmp_path / "dcp", state, hf))


def test_what_cannot_be_compared_is_refused_with_a_reason(pair: Make, tmp_path: Path) -> None:
    hf, native = pair("untied")

    def refused(kind: type[ConversionError], text: str, *folders: Path, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            compare(*(folders or (hf, native)), **options)

    refused(SourceError, "no such folder", hf, tmp_path / "absent")
    (tmp_path / "run").mkdir()
    for step in ("step-9", "step-10"):
        shutil.copytree(native, tmp_path / "run" / step)
    refused(SourceError, r"did you mean \S+step-10\?", hf, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-9" / "hf_assets")
    refused(SourceError, "no model configuration", hf, tmp_path / "run" / "step-9")
    assert compare(hf, tmp_path / "run" / "step-9", config_b=hf, tokens=4).agrees
    smaller = changed_config(hf, tmp_path / "smaller", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    refused(MappingError, "num_hidden_layers: 3 and 2", config_b=smaller)
    scaled = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    yarn = changed_config(hf, tmp_path / "yarn", rope_parameters=scaled)
    refused(SourceError, "cannot compute RoPE scaling", config_a=yarn, config_b=yarn)
    refused(PolicyError, "exceed max_position_embeddings 128", tokens=129)
    refused(PolicyError, "at least one token", tokens=0)
    refused(PolicyError, "dtype must be one of", dtype="int8")
    refused(PolicyError, "atol must be 0 or more", atol=float("nan"))
    with pytest.raises(PolicyError, match=r"must lie in 0\.\.95"):
        compute(hf, [[96]])


# -- devices and extras ------------------------------------------------------------------------------------------------


def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    pair: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, native = pair("untied")
    advice = r"not installed here: pip install 'qwen3conv\[train\]'"
    for package in ("transformers", "torchtitan"):
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, package, raising=False)
            patch.setattr(importlib.util, "find_spec", lambda name: None)
            with pytest.raises(MissingPackageError, match=f"{package}, {advice}"):
                compare(*((hf, hf) if package == "transformers" else (native, native)))


def test_torchtitan_uses_the_chosen_device_even_in_modules_that_copied_another() -> None:
    prepare_torchtitan("cpu")
    import torchtitan.models.common.token_dispatcher as copied
    from torchtitan.tools import utils

    memory = utils.device_module
    assert memory.memory_stats()["active_bytes.all.peak"] > 10 * 2**20
    assert memory.current_device() == 0
    stale = torch.cuda
    for module in (utils, copied):
        module.device_type, module.device_module = "cuda", stale
    assert prepare_torchtitan("cpu") == "cpu"
    assert [module.device_type for module in (utils, copied)] == ["cpu", "cpu"]
    assert copied.device_module is utils.device_module is not stale
    assert callable(vars(torch.distributed)["set_timeout"])


def test_without_triton_only_the_backend_that_needs_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torchtitan.distributed.minimal_async_ep.kernels"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    devices._replace_triton_kernels()
    assert not hasattr(sys.modules[name], "__file__"), "inspect reads it of every module"
    with pytest.raises(MissingPackageError, match="needs triton"):
        sys.modules[name].dispatch(torch.ones(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is usable here")
def test_a_device_that_is_not_there_is_refused_with_those_that_are(pair: Make) -> None:
    assert choose_device() == "cpu"
    with pytest.raises(MissingPackageError, match=r"'cuda' cannot be used here \(usable: cpu\)"):
        compare(*pair("untied"), device="cuda")


def test_difference_is_relative_to_each_token_and_absolute_below_one() -> None:
    a = torch.tensor([[[1000.0, 0.0], [0.5, 0.25]]])
    b = torch.tensor([[[1001.0, 0.0], [0.5, 0.5]]])
    assert parity._difference("layer 0", a, b) == ("layer 0", 1.0, 0.25)
