"""DCP folders that came out of a conversion, judged by torchtitan 0.3.0; and torchtitan's own checkpoints, read.

Logits of torchtitan's model holding our DCP against transformers' of the source, fp32 on the CPU, values up to 2.3,
measured as largest difference of any (torch 2.13.0, transformers 5.24.0): dense 0.0, tied 0.0, MoE 3.3e-3, and with
experts computed in fp32 6.0e-7. torchtitan's own compute in bfloat16 whatever their dtype.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from qwen3conv.converters.errors import MappingError, PolicyError
from qwen3conv.converters.inspection import inspect
from tests.conversions import convert, differing, fingerprint, load_dcp, policies
from tests.models import once, read_tensors, saved_model
from tests.real_checkpoints import (
    SESSION_JOBS,
    RealCheckpoint,
    read_model,
    save_dcp,
    titan_session,
    titan_state_dict,
)
from tests.titan_judge import TitanVerdict, logit_ids, titan_verdicts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")

MODEL_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "dense-fp32": ("dense-fp32", {}),
    "tied": ("dense-tied", {}),
    "tied-head-stored": ("dense-tied-sharded-head-stored", {}),
    "sharded-in-and-out": ("dense-sharded", {"shard_bytes": 50_000}),
    "moe": ("moe", {}),
    "moe-fp32": ("moe-fp32", {}),
    "moe-fused": ("moe-fused", {}),
    "moe-sharded": ("moe-sharded", {"shard_bytes": 50_000}),
}
"""Source and choices of conversions that meet torchtitan's model and adapter."""
TRAINER_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "separate-qkv": ("dense", {"fuse_qkv": False}),
    "tied": ("dense-tied", {}),
    "moe": ("moe-trainable", {}),
    "tied-fsdp-tp": ("dense-tied", {"ranks": 4, "tensor": 2}),
    "moe-fsdp-tp-ep": ("moe-trainable", {"ranks": 4, "tensor": 2, "expert": 2}),
}
"""Source and layout of what torchtitan's Trainer loads."""
BACKEND_CASES = {
    "dense": ("dense", "titan-transformers", False),
    "tied": ("dense-tied", "titan-transformers", False),
    "moe-kept": ("moe", "accelerate", False),
    "moe-replaced": ("moe", "titan-transformers", True),
}
"""Source, format, whether torchtitan puts its own MoE into the transformers model."""
LOGITS_TOLERANCE = {
    ("dense-fp32", "stock"): 1e-5,
    ("tied", "stock"): 1e-5,
    ("moe-fp32", "stock"): 1e-2,
    ("moe-fp32", "wide"): 1e-5,
}
"""By case and arithmetic of the experts; a few times what is measured, for other processors."""


class Judged(NamedTuple):
    """Our folders and what torchtitan made of them."""

    base: Path

    def verdict(self, kind: str, case: str) -> TitanVerdict:
        return TitanVerdict(self.base / "verdicts" / f"{kind} {case}")

    def dcp(self, kind: str, case: str) -> Path:
        return self.base / f"{kind} {case}" / "dcp"

    def hf(self, case: str) -> Path:
        """``dcp`` of a model case, converted back."""
        return self.base / f"model {case}" / "hf"


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """Everything that this file lets torchtitan judge, in one launch."""

    def source(variant: str) -> Path:
        return saved_model(tmp_path_factory, variant)

    def build(folder: Path) -> None:
        made, jobs = Judged(folder), {}
        for case, (variant, choices) in MODEL_CASES.items():
            convert(source(variant), made.dcp("model", case), "titan", **choices)
            convert(made.dcp("model", case), made.hf(case), "hf")
            where = {"dcp": made.dcp("model", case), "hf": made.hf(case)}
            jobs[f"model {case}"] = {"kind": "model", **where, "logits": case in {case for case, _ in LOGITS_TOLERANCE}}
        for case, (variant, layout) in TRAINER_CASES.items():
            convert(source(variant), made.dcp("trainer", case), "titan")
            jobs[f"trainer {case}"] = {
                "kind": "trainer",
                "dcp": made.dcp("trainer", case),
                "hf": source(variant),
                **layout,
            }
        convert(source("moe"), made.dcp("trainer", "older"), "titan", titan_schema="T6")
        jobs["trainer older"] = {
            "kind": "trainer",
            "dcp": made.dcp("trainer", "older"),
            "hf": source("moe"),
            "refused": True,
        }
        for case, (variant, to, titan_moe) in BACKEND_CASES.items():
            convert(source(variant), made.dcp("backend", case), to)
            jobs[f"backend {case}"] = {
                "kind": "backend",
                "dcp": made.dcp("backend", case),
                "hf": source(variant),
                "titan_moe": titan_moe,
            }
        titan_verdicts(folder / "verdicts", jobs)

    return Judged(once(tmp_path_factory, "titan-judged", build))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RealCheckpoint]:
    """What torchtitan itself wrote."""
    return titan_session(tmp_path_factory)


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model folder that a session job, or a variant, starts from."""
    jobs = {name: fields["source"] for name, fields in SESSION_JOBS}
    return lambda name: saved_model(tmp_path_factory, jobs.get(name, name))


@cache
def titan_state(folder: Path) -> dict[str, torch.Tensor]:
    """The state dict of torchtitan 0.3.0 for a model folder with per-expert names, from first principles."""
    tensors, config = read_model(folder)
    return titan_state_dict("T7", tensors, config)


def per_expert(variant: str) -> str:
    """The variant of the same weights with one tensor per expert."""
    return "moe" if variant == "moe-fused" else variant


# --- torchtitan's model and adapter -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["fused-qkv", "separate-qkv"])
@pytest.mark.parametrize("case", MODEL_CASES)
def test_names_and_shapes_are_those_of_torchtitans_model(case: str, model: str, judged: Judged) -> None:
    entries = dcp.FileSystemReader(judged.dcp("model", case)).read_metadata().state_dict_metadata
    ours = {name: list(entry.size) for name, entry in entries.items()}  # type: ignore[union-attr]
    assert ours == judged.verdict("model", case).shapes(model)


@pytest.mark.parametrize("model", ["fused-qkv", "separate-qkv"])
@pytest.mark.parametrize("case", MODEL_CASES)
def test_torchtitans_model_holds_every_bit_after_a_strict_load(
    case: str, model: str, judged: Judged, source_of: Callable[[str], Path]
) -> None:
    truth = titan_state(source_of(per_expert(MODEL_CASES[case][0])))
    assert differing(judged.verdict("model", case).tensors(model), truth) == []


@pytest.mark.parametrize("case", MODEL_CASES)
def test_torchtitans_adapter_makes_the_hugging_face_folder_that_we_make(case: str, judged: Judged) -> None:
    theirs, ours = judged.verdict("model", case).tensors("to-hf"), read_tensors(judged.hf(case))
    if case == "tied-head-stored":  # the adapter never stores a tied head; we keep what the source had
        assert torch.equal(ours.pop("lm_head.weight"), ours["model.embed_tokens.weight"])
    assert differing(ours, theirs) == []


@pytest.mark.parametrize("case", MODEL_CASES)
def test_torchtitans_adapter_makes_the_dcp_that_we_make(case: str, judged: Judged) -> None:
    theirs, ours = judged.verdict("model", case).tensors("from-hf"), load_dcp(judged.dcp("model", case))
    biases = {name: ours.pop(name) for name in list(ours) if name.endswith("expert_bias_E")}
    assert differing(ours, theirs) == []
    # What the adapter leaves out, and the Trainer asks for.
    layers, experts = (3, 5) if "moe" in case else (0, 0)
    assert differing(biases, {f"layers.{n}.moe.expert_bias_E": torch.zeros(experts) for n in range(layers)}) == []


@pytest.mark.parametrize(("case", "experts"), LOGITS_TOLERANCE)
def test_torchtitans_model_computes_what_transformers_computes(
    case: str, experts: str, judged: Judged, source_of: Callable[[str], Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(source_of(MODEL_CASES[case][0]), dtype=torch.float32)
    with torch.no_grad():
        wanted = model(input_ids=logit_ids(model.config.vocab_size)).logits
    found = judged.verdict("model", case).tensors("logits")[experts]
    assert found.shape == wanted.shape
    assert wanted.std() > 0.05
    assert (found - wanted).abs().max().item() <= LOGITS_TOLERANCE[case, experts]


def test_one_copy_of_a_tied_head_is_stored_under_both_names(judged: Judged) -> None:
    folder = judged.dcp("model", "tied")
    metadata = dcp.FileSystemReader(folder).read_metadata()
    places = {index.fqn: (info.relative_path, info.offset) for index, info in metadata.storage_data.items()}
    assert places["lm_head.weight"] == places["tok_embeddings.weight"]
    loaded = load_dcp(folder)
    assert torch.equal(loaded["lm_head.weight"], loaded["tok_embeddings.weight"])
    assert loaded["lm_head.weight"].isfinite().all()


def test_files_are_split_where_asked(judged: Judged) -> None:
    for case in ("sharded-in-and-out", "moe-sharded"):
        sizes = [path.stat().st_size for path in judged.dcp("model", case).glob("*.distcp")]
        assert len(sizes) > 3
        assert max(sizes) < 70_000


# --- torchtitan's Trainer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TRAINER_CASES)
def test_the_trainer_starts_from_our_folder(case: str, judged: Judged, source_of: Callable[[str], Path]) -> None:
    truth = titan_state(source_of(TRAINER_CASES[case][0]))
    live = judged.verdict("trainer", case).tensors("trainer")
    assert differing(live, truth, lambda tensor: tensor.float()) == []  # it keeps master weights in fp32


def test_the_trainer_refuses_an_older_schema(judged: Judged) -> None:
    """So the tests above can fail: its loading is strict."""
    assert "Missing key in checkpoint state_dict: layers.0.moe.routed" in judged.verdict("trainer", "older").refusal()


@pytest.mark.parametrize("case", BACKEND_CASES)
def test_torchtitans_transformers_backend_holds_every_bit_after_a_strict_load(
    case: str, judged: Judged, source_of: Callable[[str], Path]
) -> None:
    variant, _, titan_moe = BACKEND_CASES[case]
    loaded = judged.verdict("backend", case).tensors("backend")
    model = AutoModelForCausalLM.from_pretrained(source_of(variant))
    truth = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if titan_moe:
        truth = {name: tensor for name, tensor in truth.items() if ".mlp." not in name}
        moe = {name: tensor for name, tensor in titan_state(source_of(variant)).items() if ".moe." in name}
        truth |= {f"model.model.{name.replace('.moe.', '.mlp.')}": tensor for name, tensor in moe.items()}
    assert differing(loaded, truth) == []


# --- torchtitan's own checkpoints, read -------------------------------------------------------------------------------

STEPPED = [name for name, fields in SESSION_JOBS if fields.get("steps")]
TRAINED = [name for name in STEPPED if not name.startswith("exported")]
"""Those with everything that a run needs to go on; an exported one is the model alone."""
WITH_BIAS = [name for name, fields in SESSION_JOBS if "moe" in name and fields.get("load_balance", True)]
ALL = [name for name, _ in SESSION_JOBS]


def without_biases(truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in truth.items() if not name.endswith("expert_bias")}


@pytest.mark.parametrize("name", ALL)
def test_what_torchtitan_wrote_becomes_the_model_that_it_held(
    name: str, written: dict[str, RealCheckpoint], source_of: Callable[[str], Path], room: Path
) -> None:
    checkpoint = written[name]
    convert(checkpoint.folder, room / "hf", "hf", like=source_of(name), drop_expert_bias=name in WITH_BIAS)
    truth = without_biases(checkpoint.tensors())
    if "tied" in name:
        truth.pop("lm_head.weight", None)
    assert differing(read_tensors(room / "hf"), truth) == []
    if name in STEPPED:  # or it would be no news that the weights are right
        assert differing(read_tensors(source_of(name)), truth, lambda tensor: tensor.bfloat16()) != []
    model, info = AutoModelForCausalLM.from_pretrained(room / "hf", output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == (torch.bfloat16 if name in ("bf16", "exported-moe") else torch.float32)


@pytest.mark.parametrize("name", ALL)
def test_inspect_finds_it_whole_and_lists_what_else_is_there(name: str, written: dict[str, RealCheckpoint]) -> None:
    report = inspect(written[name].folder)
    assert (report.format, report.schema, report.complete, report.problems) == ("titan", "T7", True, ())
    assert {fqn.split(".")[0] for fqn in report.others} == (
        {"optimizer", "lr_scheduler", "train_state", "dataloader"} if name in TRAINED else set()
    )
    if name in TRAINED:
        shown = report.others["optimizer.state.layers.0.attention.wo.weight.exp_avg"]
        assert shown.startswith("F32 [")
        assert any("wqkv" in fqn for fqn in report.others) == ("separate" not in name)
        assert "train_state.step" in report.others


@pytest.mark.parametrize("name", TRAINED)
def test_training_state_is_left_alone_and_the_plan_says_so(
    name: str, written: dict[str, RealCheckpoint], source_of: Callable[[str], Path], room: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in written[name].folder.rglob("*")}
    manifest = convert(written[name].folder, room / "out", "titan", like=source_of(name))
    assert policies(manifest)["model-only"]["entries"] == len(inspect(written[name].folder).others)
    assert not any(fqn.startswith(("optimizer", "train_state")) for fqn in manifest.tensors)
    assert {path: path.stat().st_mtime_ns for path in written[name].folder.rglob("*")} == before
    stored = dcp.FileSystemReader(room / "out").read_metadata().state_dict_metadata
    model_only = {fqn for fqn in stored if fqn.split(".")[0] in ("tok_embeddings", "layers", "norm", "lm_head")}
    assert set(stored) == model_only


@pytest.mark.parametrize("name", WITH_BIAS)
def test_a_routing_bias_is_not_dropped_unasked_and_its_size_is_named(
    name: str, written: dict[str, RealCheckpoint], source_of: Callable[[str], Path], room: Path
) -> None:
    biases = {k: v for k, v in written[name].tensors().items() if k.endswith("expert_bias")}
    largest = max(bias.abs().max().item() for bias in biases.values())
    assert largest > 0
    with pytest.raises(PolicyError) as refused:
        convert(written[name].folder, room / "hf", "hf", like=source_of(name))
    message = str(refused.value)
    assert f"the largest {largest:.4g} in " in message
    assert "--drop-expert-bias" in message
    assert list(room.iterdir()) == []
    dropped = convert(written[name].folder, room / "hf", "hf", like=source_of(name), drop_expert_bias=True)
    assert policies(dropped)["drop-expert-bias"]["max_abs"] == largest


def test_without_a_routing_bias_nothing_is_asked(
    written: dict[str, RealCheckpoint], source_of: Callable[[str], Path], room: Path
) -> None:
    manifest = convert(written["moe-without-bias"].folder, room / "hf", "hf", like=source_of("moe"))
    assert "drop-expert-bias" not in policies(manifest)


@pytest.mark.parametrize("schema", ["T2", "T3-fused", "T4", "T5-fused", "T6", "T7"])
@pytest.mark.parametrize("name", ["moe", "trained-moe", "exported-moe", "trained-moe-fsdp-tp-ep"])
def test_another_schema_keeps_the_routing_bias_bit_for_bit(
    name: str, schema: str, written: dict[str, RealCheckpoint], source_of: Callable[[str], Path], room: Path
) -> None:
    tensors, (_, config) = written[name].tensors(), read_model(source_of(name))
    convert(written[name].folder, room / "out", "titan", titan_schema=schema)
    age, _, fused = schema.partition("-")
    expected = titan_state_dict(age, tensors, config, fused_qkv=bool(fused), expert_bias=None)
    suffix = "_E" if age >= "T5" else ""
    for layer in range(config["num_hidden_layers"]):
        expected[f"layers.{layer}.moe.expert_bias{suffix}"] = tensors[f"model.layers.{layer}.mlp.expert_bias"]
    assert differing(load_dcp(room / "out"), expected) == []
    assert fingerprint(room / "out") == fingerprint(written[name].folder)


def test_a_schema_from_before_experts_is_refused_for_a_moe(written: dict[str, RealCheckpoint], room: Path) -> None:
    with pytest.raises(MappingError, match=r"T1.*no place for .*experts"):
        convert(written["moe"].folder, room / "out", "titan", titan_schema="T1")


@pytest.mark.parametrize(("bias", "is_one"), [(0.0, False), (-0.0, False), (1e-30, True), (float("nan"), True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_zero_bias_is_none_and_any_other_is_part_of_the_model(
    dtype: str, bias: float, is_one: bool, source_of: Callable[[str], Path], room: Path
) -> None:
    tensors, config = read_model(source_of("moe"))
    state = titan_state_dict("T7", tensors, config)
    state["layers.1.moe.expert_bias_E"] = torch.tensor([0, bias, 0, 0, 0], dtype=getattr(torch, dtype))
    save_dcp(state, room / "dcp")
    assert (fingerprint(room / "dcp") == fingerprint(source_of("moe"))) != is_one
    if is_one:
        with pytest.raises(PolicyError, match=r"1 of 3 layers .* in layer 1, expert_bias"):
            convert(room / "dcp", room / "hf", "hf", like=source_of("moe"))
    else:
        convert(room / "dcp", room / "hf", "hf", like=source_of("moe"))
        assert differing(read_tensors(room / "hf"), tensors) == []


def test_a_config_beside_the_weights_is_used_and_none_is_made_up(
    written: dict[str, RealCheckpoint], source_of: Callable[[str], Path], room: Path
) -> None:
    """torchtitan writes no config.json: without one the missing values are listed, not guessed."""
    with pytest.raises(PolicyError) as refused:
        convert(written["dense"].folder, room / "hf", "hf")
    for key in ("rope_theta", "rms_norm_eps", "max_position_embeddings"):
        assert f"--set {key}=" in str(refused.value)
    shutil.copytree(written["dense"].folder, room / "dcp")
    shutil.copy(source_of("dense") / "config.json", room / "dcp")
    convert(room / "dcp", room / "hf", "hf")
    written_config = json.loads((room / "hf" / "config.json").read_text())
    source_config = json.loads((source_of("dense") / "config.json").read_text())
    assert written_config == {**source_config, "dtype": "float32"}
