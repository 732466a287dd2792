"""Options that several commands share; of a conversion, all as one value, ``Options``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from .values import Flavor, FormatName, Place, Setting, Size, TitanSchema

if TYPE_CHECKING:
    from qwen3conv.converters.policies import Choices, KvHeads, OptimizerForm
    from qwen3conv.converters.stores.nxd_bindings import Queries

Function = Callable[..., None]

DESTINATION = click.Path(path_type=Path, readable=False)  # the engine looks at it, and says what to do


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Options:
    """What the options of a converting command say; a field whose option a command lacks keeps its default."""

    json: bool = False
    dtype: str | None = None
    lm_head: Literal["keep", "drop", "write"] = "keep"
    untie: bool = False
    drop_expert_bias: bool = False
    config_style: Literal["source", "v4", "v5", "both"] = "source"
    vocab_rows: int | None = None
    titan_schema: str | None = None
    shard_size: int | None = None
    like: str | None = None
    config_from: Literal["like", "source"] | None = None
    settings: tuple[tuple[str, object], ...] = ()
    flavor: str | None = None
    tp: int = 1
    fsdp: int = 1
    ep: int = 1
    pp: int = 1
    layout: str | None = None
    kv_heads: KvHeads | None = None
    query_heads: Queries | None = None
    optimizer: OptimizerForm | None = None
    """Of ``upgrade``, which carries the training state too."""
    overwrite: bool = False
    resume: bool = False
    workers: int = 2
    max_memory: int | None = None
    no_digests: bool = False
    dry_run: bool = False
    keep_download: bool = False

    def check(self, to: str) -> None:
        """Refuse options that say nothing about format ``to``: taken in silence, they would be a surprise.

        Raises:
            click.UsageError: naming the option.
        """
        from qwen3conv.converters.formats import FORMATS

        if self.config_from is not None and self.like is None:
            raise click.UsageError("--config-from chooses between the source's config and that of --like; give --like")
        if self.titan_schema is not None and to != "titan" and (to, self.layout) != ("ranks", "titan"):
            raise click.UsageError(f"--titan-schema is for --to titan, not {to}")
        if self.layout is not None and to != "ranks":
            raise click.UsageError(f"--layout is for rank files, whose names it chooses; {to} has its own")
        if self.kv_heads is not None and not to.startswith("nxd"):
            raise click.UsageError(f"--kv-heads is for nxd shards, not {to}")
        is_cut = FORMATS[to].is_per_rank or self.tp * self.fsdp * self.ep * self.pp > 1
        if self.shard_size is not None and is_cut:
            raise click.UsageError("--shard-size is for whole checkpoints; of one that is cut, each rank has a file")
        if self.flavor is not None and to != "titan":
            raise click.UsageError(f"--flavor is for --to titan, not {to}")
        if self.lm_head != "keep" and FORMATS[to].store == "dcp":
            raise click.UsageError(f"--lm-head is for Hugging Face outputs; {to} stores a tied head under both names")

    def choices(self, like: Path | None) -> Choices:
        """The same for the engine; ``like`` is where ``--like`` was found to be."""
        from qwen3conv.converters.dtypes import FROM_TORCH_NAME
        from qwen3conv.converters.placement import Mesh
        from qwen3conv.converters.policies import Choices

        return Choices(
            dtype=None if self.dtype is None else FROM_TORCH_NAME[self.dtype],
            lm_head=self.lm_head,
            untie=self.untie,
            drop_expert_bias=self.drop_expert_bias,
            config_style=self.config_style,
            vocab_rows=self.vocab_rows,
            titan_schema=self.titan_schema or Choices().titan_schema,
            shard_bytes=self.shard_size,
            like=like,
            config_from=self.config_from,
            settings=dict(self.settings),
            flavor=self.flavor,
            mesh=Mesh(tp=self.tp, fsdp=self.fsdp, ep=self.ep, pp=self.pp),
            rank_layout=self.layout or Choices().rank_layout,
            kv_heads=self.kv_heads,
            query_heads=self.query_heads,
            optimizer=self.optimizer,
        )


def json_option(function: Function) -> Function:
    """``--json``."""
    return click.option("--json", is_flag=True, help="Print one JSON document.")(function)


def workers_option(function: Function) -> Function:
    """``--workers``."""
    return click.option(
        "--workers",
        type=click.IntRange(min=1),
        default=lambda: min(2, usable_cores()),
        metavar="N",
        show_default="the cores, at most 2",
        help="Threads that read and write.",
    )(function)


def keep_download_option(function: Function) -> Function:
    """``--keep-download``."""
    return click.option("--keep-download", is_flag=True, help="Keep what a hub id fetches in the hub's cache.")(
        function
    )


def untie_option(function: Function) -> Function:
    """``--untie``."""
    return click.option(
        "--untie",
        is_flag=True,
        help="Take a stored head that differs from the embeddings though the config says tied.",
    )(function)


def like_option(text: str) -> Callable[[Function], Function]:
    """``--like``, with what it is for."""
    return click.option("--like", type=Place(), metavar="FOLDER|HUB_ID", help=text)


def _query_heads_option(function: Function) -> Function:
    return click.option(
        "--query-heads",
        type=click.Choice(["follow", "natural"]),
        help="Of NxD shards that repeat key-value heads: do query heads follow them, or lie in natural order?",
    )(function)


def reading_options(function: Function) -> Function:
    """``--like`` and ``--query-heads``: what a checkpoint that is only read may not say of itself."""
    return like_option("Take config.json from there: for a checkpoint that has none.")(_query_heads_option(function))


_CONVERSION: tuple[tuple[str, Callable[[Function], Function]], ...] = (
    (
        "dtype",
        click.option(
            "--dtype",
            type=click.Choice(["bfloat16", "float16", "float32"]),
            help="Cast every parameter. Default: keep each tensor's own; FP8 becomes bfloat16.",
        ),
    ),
    (
        "lm_head",
        click.option(
            "--lm-head",
            type=click.Choice(["keep", "drop", "write"]),
            default="keep",
            help="Whether a tied head is stored: as in the source (keep, the default), never, always.",
        ),
    ),
    ("untie", untie_option),
    (
        "drop_expert_bias",
        click.option(
            "--drop-expert-bias",
            is_flag=True,
            help="Leave out a routing bias that is not zero and that the target has no place for.",
        ),
    ),
    (
        "config_style",
        click.option(
            "--config-style",
            type=click.Choice(["source", "v4", "v5", "both"]),
            default="source",
            help="Spelling of config.json: as in the source (default), transformers 4, 5, or for both.",
        ),
    ),
    (
        "vocab_rows",
        click.option(
            "--vocab-rows",
            type=click.IntRange(min=1),
            metavar="N",
            help="Rows of embeddings and head: new ones are zero, only zero ones may go.",
        ),
    ),
    (
        "titan_schema",
        click.option(
            "--titan-schema",
            type=TitanSchema(),
            metavar="SCHEMA",
            help="torchtitan's key schema T1 to T7, or its release such as 0.3. Default: T7.",
        ),
    ),
    (
        "shard_size",
        click.option(
            "--shard-size",
            type=Size(),
            metavar="SIZE",
            help="Largest output file, such as 500MB or 2GiB. Default: the source's own split, else 5GB; DCP: 2GB.",
        ),
    ),
    (
        "like",
        like_option("Take config.json, tokenizer and, of none known, the file split from there (no weights are read)."),
    ),
    (
        "config_from",
        click.option(
            "--config-from",
            type=click.Choice(["like", "source"]),
            help="Which config to believe when --like and the source differ.",
        ),
    ),
    (
        "settings",
        click.option(
            "--set",
            "settings",
            type=Setting(),
            metavar="KEY=VALUE",
            multiple=True,
            help="A config value for weights without config.json, such as rope_theta=1000000. Repeatable.",
        ),
    ),
    ("query_heads", _query_heads_option),
    (
        "flavor",
        click.option(
            "--flavor",
            type=Flavor(),
            metavar="NAME",
            help="torchtitan flavor to train with, such as 0.6B: refuse if it computes something else.",
        ),
    ),
    ("overwrite", click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DST.")),
    ("resume", click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped.")),
    ("workers", workers_option),
    (
        "max_memory",
        click.option(
            "--max-memory", type=Size(), metavar="SIZE", help="Cap of the copy buffers, all workers together."
        ),
    ),
    ("no_digests", click.option("--no-digests", is_flag=True, help="Write no digests: faster, but no proof.")),
    ("keep_download", keep_download_option),
    ("dry_run", click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")),
    ("json", json_option),
)


def _degree(name: str, text: str) -> tuple[str, Callable[[Function], Function]]:
    return name, click.option(f"--{name}", type=click.IntRange(1, 1 << 16), default=1, metavar="N", help=text)


_MESH: tuple[tuple[str, Callable[[Function], Function]], ...] = (
    _degree("tp", "Tensor-parallel ranks."),
    _degree("fsdp", "FSDP2 ranks (torchtitan's dp_shard); rows of what tensor parallelism leaves."),
    _degree("ep", "Expert-parallel ranks, taken from fsdp * tp."),
    _degree("pp", "Pipeline stages: layers in equal runs."),
    (
        "layout",
        click.option(
            "--layout",
            type=click.Choice(["hf", "hf-fused", "titan"]),
            help="Names and fusion inside rank files. Default: hf-fused, what transformers 5 holds in memory.",
        ),
    ),
    (
        "kv_heads",
        click.option(
            "--kv-heads",
            type=click.Choice(["tiled", "interleaved"]),
            help="How nxd shards repeat key-value heads when tp exceeds them: as on trn1, or as on trn2.",
        ),
    ),
)


def conversion_options(*, mesh: bool = False, without: Collection[str] = ()) -> Callable[[Function], Function]:
    """All options of a conversion but ``without``, handed to the command as one ``options: Options``.

    ``mesh`` adds the degrees of parallelism.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def collected(*args: Any, **kwargs: Any) -> None:
            given = {field.name: kwargs.pop(field.name) for field in fields(Options) if field.name in kwargs}
            function(*args, options=Options(**given), **kwargs)

        wrapped: Function = collected
        for name, option in reversed((*(_MESH if mesh else ()), *_CONVERSION)):
            if name not in without:
                wrapped = option(wrapped)
        return wrapped

    return decorate


def to_option(default: str | None = None) -> Callable[[Function], Function]:
    """``--to``; required without a default."""
    text = "See `qwen3conv formats`."
    if default is None:  # click 8.4 takes a default of None, given, for an answer
        return click.option("--to", type=FormatName(), required=True, metavar="FORMAT", help=text)
    return click.option(
        "--to", type=FormatName(), default=default, metavar="FORMAT", help=f"{text} Default: {default}."
    )


def source_argument(name: str, metavar: str) -> Callable[[Function], Function]:
    """A folder or a hub id."""
    return click.argument(name, type=Place(), metavar=metavar)
