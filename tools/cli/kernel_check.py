"""``kernel-check``: are the NKI expert kernels right on this machine, and what would they cost on trn2?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .command import DIFFERENT, Command
from .options import json_option
from .output import print_json, print_table, say

if TYPE_CHECKING:
    from qwen3conv.tools.kernel_check import Finding, Subject
    from qwen3conv.training.kernels.performance import Layer

_SHAPES = ("30B-A3B", "235B-A22B", "Coder-480B", "study")
_SMALL = {"hidden": 256, "expert_hidden": 256}
_FEW = 8


@click.command("kernel-check", cls=Command, example="qwen3conv kernel-check --model --shape 30B-A3B")
@click.option("--model", is_flag=True, help="Print what a layer would cost on trn2, by arithmetic; run nothing.")
@click.option("--emulate", is_flag=True, help="Run the kernels in NumPy, which says nothing about hardware.")
@click.option("--against", type=click.Choice(["reference"]), default="reference", help="PyTorch in float64.")
@click.option("--shape", type=click.Choice(_SHAPES, case_sensitive=False), help="Sizes of a released layer.")
@click.option("--hidden", type=click.IntRange(1), metavar="N", help="Or these. Hidden size.")
@click.option("--expert-hidden", type=click.IntRange(1), metavar="N", help="Hidden size of an expert.")
@click.option("--experts", type=click.IntRange(1), metavar="N", help="Experts. Default of a comparison: 8.")
@click.option("--top-k", type=click.IntRange(1), metavar="N", help="Experts per token, for --model.")
@click.option("--tokens", type=click.IntRange(1), metavar="N", help="Tokens per device and layer, for --model.")
@click.option(
    "--lnc", type=click.IntRange(1, 2), metavar="N", help="Cores per logical core, for --model and --emulate."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="One of the two. Default: both.")
@json_option
@click.pass_context
def kernel_check(
    ctx: click.Context,
    model: bool,
    emulate: bool,
    against: str,
    shape: str | None,
    hidden: int | None,
    expert_hidden: int | None,
    experts: int | None,
    top_k: int | None,
    tokens: int | None,
    lnc: int | None,
    dtype: str | None,
    json: bool,
) -> None:
    """Output and gradients of the NKI expert kernels, against PyTorch in float64.

    Runs on a Neuron device, else on the simulator of AWS's nki. Exit 1 if neither is there, 3 if an error is more than
    twice that of torch's own grouped product in the same dtype. The kernels never ran on hardware yet.
    """
    if model and emulate:
        raise click.UsageError("--model runs nothing; leave --emulate away")
    sizes = {"hidden": hidden, "expert_hidden": expert_hidden, "experts": experts, "top_k": top_k, "tokens": tokens}
    given = {name: value for name, value in sizes.items() if value is not None}
    if model:
        _show_model(_layer(shape, given, dtype), (lnc,) if lnc else (1, 2), json)
        return
    if "top_k" in given or "tokens" in given:
        raise click.UsageError("--top-k and --tokens are for --model; a comparison has routings of its own")
    if lnc and not emulate:
        raise click.UsageError("--lnc is for --model and --emulate; a device's is NEURON_LOGICAL_NC_CONFIG")
    wide = {"hidden", "expert_hidden"}
    base = {**_SMALL, "experts": _FEW, **({} if shape is None else _sizes_of(shape, wide)), **given}
    from qwen3conv.tools.kernel_check import DTYPES, cases, check
    from qwen3conv.tools.kernel_subjects import emulated_subject, real_subject

    with emulated_subject(lnc or 2) if emulate else real_subject() as subject:
        todo = cases(base["experts"])
        dtypes = [dtype] if dtype else list(DTYPES)
        findings = list(check(subject, todo, dtypes, base["hidden"], base["expert_hidden"]))
    _show_findings(subject, base, findings, emulate, json)
    ctx.exit(0 if all(one.passes for one in findings) else DIFFERENT)


def _sizes_of(shape: str, names: set[str]) -> dict[str, int]:
    from qwen3conv.training.kernels.performance import SHAPES

    return {name: getattr(SHAPES[shape], name) for name in names}


def _layer(shape: str | None, given: dict[str, int], dtype: str | None) -> Layer:
    from dataclasses import replace

    from qwen3conv.converters.errors import PolicyError
    from qwen3conv.training.kernels.performance import SHAPES, Layer

    width = 4 if dtype == "float32" else 2
    if shape is not None:
        layer = replace(SHAPES[shape], width=width, **given)
    else:
        missing = [f"--{name.replace('_', '-')}" for name in Layer.__dataclass_fields__ if name not in given]
        missing.remove("--width")
        if missing:
            raise click.UsageError(f"--model needs --shape, or also {', '.join(missing)}")
        layer = Layer(**given, width=width)
    if layer.top_k > layer.experts:
        raise PolicyError(f"a token cannot take {layer.top_k} of {layer.experts} experts")
    return layer


def _show_findings(subject: Subject, base: dict[str, int], findings: list[Finding], emulate: bool, json: bool) -> None:
    from dataclasses import asdict

    from qwen3conv.tools.kernel_subjects import EMULATED

    passes = all(one.passes for one in findings)
    if json:
        rows = [{**asdict(one), "allowed": one.allowed, "passes": one.passes} for one in findings]
        about = {"where": subject.where, "nki": subject.nki, "hardware": subject.hardware, **base}
        print_json({"passes": passes, **about, "findings": rows})
        return
    say(f"{subject.where}; {subject.nki}; hidden {base['hidden']}, expert hidden {base['expert_hidden']}")
    if emulate:
        say(EMULATED)
    worst: dict[tuple[str, str], Finding] = {}
    for one in findings:
        key = (one.dtype, one.result)
        if key not in worst or not one.error / one.allowed <= worst[key].error / worst[key].allowed:
            worst[key] = one
    table = [
        (one.dtype, one.result, f"{one.error:.1e}", f"{one.grouped_mm:.1e}", "ok" if one.passes else "WRONG", one.case)
        for one in worst.values()
    ]
    print_table(table, ("DTYPE", "RESULT", "ERROR", "GROUPED_MM", "", "WORST CASE, ROWS PER EXPERT"), right=(2, 3))
    wrong = sum(not one.passes for one in findings)
    say(f"{len(findings)} results compared, " + (f"{wrong} wrong." if wrong else "all within what is allowed."))


def _show_model(layer: Layer, degrees: tuple[int, ...], json: bool) -> None:
    from qwen3conv.training.kernels.performance import choose, estimates, padding, ridge

    rows: list[dict[str, Any]] = []
    for lnc in degrees:
        for block, passes in estimates(layer, lnc).items():
            for one in passes:
                rows.append(
                    {
                        "lnc": lnc,
                        "block": block,
                        "pass": one.kind,
                        "blocks": one.used,
                        "useful_flops": one.useful_flops,
                        "flops": one.flops,
                        "padding": padding(layer, block)._asdict(),
                        "core": {**one.core._asdict(), "hbm_bytes": one.core.hbm_bytes},
                        "flops_per_byte": one.intensity,
                        "seconds": one.seconds,
                        "bound": one.bound,
                        "bound_seconds": one.bound_seconds,
                        "peak_share": one.peak_share,
                    }
                )
    choices = {str(lnc): choose(layer, lnc)._asdict() for lnc in degrees}
    if json:
        print_json({"layer": _plain(layer), "estimates": rows, "choices": choices, "ridge": ridge(layer.width)})
        return
    say(f"{layer.tokens:,} tokens, top-{layer.top_k} of {layer.experts} experts, routed uniformly; per core of trn2")
    table = [
        (
            f"{row['lnc']}", f"{row['block']}", row["pass"], f"{row['padding']['expected']:.2f}",
            f"{row['padding']['worst']:.2f}", f"{row['flops'] / row['lnc'] / 1e9:,.0f}",
            f"{row['core']['hbm_bytes'] / 1e9:.2f}", f"{row['core']['dmas']:,.0f}", f"{row['flops_per_byte']:.0f}",
            f"{row['bound_seconds'] * 1e3:.2f}", row["bound"], f"{row['peak_share']:.0%}",
        )
        for row in rows
    ]  # fmt: skip
    titles = ("LNC", "B", "PASS", "PAD", "WORST", "GFLOP", "GB", "DMAS", "FLOP/B", "MS", "BOUND BY", "PEAK")
    print_table(table, titles, right=(0, 1, 3, 4, 5, 6, 7, 8, 9, 11))
    for lnc in degrees:
        say(f"LNC {lnc}: B {choices[str(lnc)]['block']}: {choices[str(lnc)]['reason']}.")
    say("Lower bounds by arithmetic; nothing was measured.")


def _plain(layer: Layer) -> dict[str, int]:
    from dataclasses import asdict

    return asdict(layer)
