"""What each rank's tensors are made of in a training checkpoint of neuronx-distributed (NxD) or optimum-neuron.

Column-parallel weights are cut along dim 0, o_proj and down_proj along dim 1, norms are whole on every rank. Per rank,
``gate_up_proj`` is [gate; up] and ``qkv_proj.weight_qkv`` [q; k; v]; ``qkv_proj.weight_q/_k/_v`` are the three alone.

With ``kv_size_multiplier`` m each key-value head is stored m times, in kv * m slots that the ranks share out in order.
Slot g holds, and its heads / (kv * m) query heads are (G = heads / kv query heads share a key-value head)::

    tiled        head g % kv      queries  (g % kv) * G + (g // kv) * G / m  and following   (trn1; optimum-neuron)
    interleaved  head g // m      queries  in natural order                                  (trn2 runtime)

Columns of o_proj follow the query heads. NxD's converter with ``hw_backend trn2`` tiles the key-value heads and yet
leaves the queries in natural order, so which of the two orders holds for tiled heads cannot be told from the weights.

Sources: optimum-neuron, ``models/training/transformations_utils.py`` (``GQAQKVColumnParallelLinearSpec``,
``FusedLinearsSpec``); neuronx-distributed, ``scripts/checkpoint_converter.py``, ``modules/qkv_linear.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from ..boxes import Box, Shape
from ..errors import MappingError, PolicyError, SourceError
from ..geometry import Geometry
from ..layouts import Binding, Layout, bind
from ..ops import Piece
from ..parameters import BY_NAME
from ..placement import CUT_BY_TP, chunk, rank_name
from .nxd_training import NxdMesh, NxdShards

Queries = Literal["follow", "natural"]
"""Order of the query heads where key-value heads are tiled: after the copies of these, or as the hub has them."""


class Heads(NamedTuple):
    """How attention heads lie in the slots of all ranks."""

    keys: tuple[int, ...]
    """Per slot, its key-value head."""
    queries: tuple[tuple[int, ...], ...]
    """Per slot, its query heads."""
    cuts_hidden: bool = False
    """Whether embeddings are cut along the hidden size, as NxD Inference does, and not by vocabulary rows."""


_ATTENTION = "model.layers.{layer}.self_attn"
_Q, _K, _V, _O = (f"{_ATTENTION}.{name}_proj.weight" for name in "qkvo")
_DOWN = ".down_proj.weight"

Read = Callable[[str, int, int], bytes]
"""``(file, offset, size) -> bytes`` of a file of the checkpoint."""


Stages = Callable[[str], Sequence[int]]
"""FQN -> the pipeline ranks that hold it."""


def nxd_heads(shards: NxdShards, geometry: Geometry, read: Read, *, queries: Queries | None = None) -> Heads:
    """Where the heads are. With replicated key-value heads, their rows of one layer are read and compared.

    ``queries`` decides for tiled key-value heads, unless metadata do.

    Raises:
        MappingError: the shapes are not those of the geometry's heads, cut by the number of ranks.
        SourceError: the key-value heads are repeated in no known way.
        PolicyError: they are tiled, and nothing says how the query heads lie; or ``queries`` contradicts what is known.
    """
    tp, kv, heads = shards.mesh.tp, geometry.num_key_value_heads, geometry.num_attention_heads
    name, first, rows = _key_rows(shards, geometry)
    slots, rest = divmod(rows * tp, geometry.head_dim)
    if rest or slots % kv or slots % tp or heads % slots:
        raise MappingError(
            f"{name} has {rows} rows of keys on each of {tp} ranks; {kv} key-value heads of {geometry.head_dim} rows "
            f"and {heads} query heads cannot make that, whatever the kv_size_multiplier (padded heads are not read)"
        )
    multiplier = slots // kv
    if shards.stated is not None and shards.stated.multiplier != multiplier:
        raise SourceError(
            f"the metadata state kv_size_multiplier {shards.stated.multiplier}, but {name} has the rows of {multiplier}"
        )
    if multiplier == 1:
        return _heads("natural", tuple(range(kv)), heads)
    blocks = _key_blocks(shards, name, first, rows, geometry.head_dim, read)
    tiled, interleaved = tuple(g % kv for g in range(slots)), tuple(g // multiplier for g in range(slots))
    fitting = [keys for keys in dict.fromkeys((tiled, interleaved)) if _repeats(blocks, keys)]
    if len(fitting) != 1:
        raise SourceError(
            f"{name} holds the {kv} key-value heads {multiplier} times, neither all in turn again and again nor each "
            "several times in a row, as NxD does; or distinct heads are equal, so that it cannot be told"
        )
    if fitting == [interleaved]:
        if queries == "follow":
            raise PolicyError(
                f"{name} holds each key-value head {multiplier} times in a row, which leaves query heads in natural "
                "order: --query-heads follow is for heads repeated all in turn; leave it out"
            )
        return _heads("natural", interleaved, heads)
    if shards.stated is not None:
        stated: Queries = "follow" if shards.stated.queries_follow else "natural"
        queries = agreed_queries(queries, stated, "the metadata beside the shards")
    if queries is None:
        raise PolicyError(
            f"{name} holds the {kv} key-value heads {multiplier} times, all in turn. NxD on trn1 reorders the query "
            "heads after that, its converter for trn2 does not, and the weights do not tell: pass "
            "--query-heads follow or natural"
        )
    return _heads(queries, tiled, heads)


def agreed_queries(given: Queries | None, stated: Queries, where: str) -> Queries:
    """The order that ``where`` states.

    Raises:
        PolicyError: the user gives the other one, which would make another model.
    """
    if given not in (None, stated):
        raise PolicyError(
            f"--query-heads {given} contradicts {where}, which says {stated}: another order is another model; "
            "leave the option out"
        )
    return stated


def made_heads(geometry: Geometry, tp: int, order: Literal["tiled", "interleaved"] | None) -> Heads:
    """Where heads go in an output: each key-value head once, or where there are more ranks, as often as it takes.

    Raises:
        PolicyError: key-value heads must be repeated, and nothing says in which order.
    """
    kv, heads = geometry.num_key_value_heads, geometry.num_attention_heads
    if tp <= kv:
        return _heads("natural", tuple(range(kv)), heads)
    if order is None:
        raise PolicyError(
            f"tp {tp} repeats the {kv} key-value heads {tp // kv} times, which NxD does in two ways: give --kv-heads "
            "tiled (all in turn, query heads reordered after them: trn1) or interleaved (each several times in a row: "
            "trn2)"
        )
    if order == "tiled":
        return _heads("follow", tuple(g % kv for g in range(tp)), heads)
    return _heads("natural", tuple(g * kv // tp for g in range(tp)), heads)


def nxd_stages(geometry: Geometry, pp: int) -> Stages:
    """Pipeline ranks of an output: layers in equal runs, the last ones longer, embeddings first, norm and head last.

    Source: neuronx-distributed, ``pipeline/partition.py``.
    """
    each, longer = divmod(geometry.num_hidden_layers, pp)
    stage_of = [stage for stage in range(pp) for _ in range(each + (stage >= pp - longer))]

    def stages(fqn: str) -> Sequence[int]:
        _, is_layer, rest = fqn.partition("layers.")
        if is_layer:
            return (stage_of[int(rest.partition(".")[0])],)
        return (0,) if "embed_tokens" in fqn else (pp - 1,)

    return stages


def nxd_bindings(
    layout: Layout, geometry: Geometry, heads: Heads, mesh: NxdMesh, stages: Stages, *, tied: bool
) -> Iterator[Binding]:
    """What every rank stores, for ``planning.tabulate``: names ``rank/FQN``, local shapes, pieces.

    Parts that several ranks hold (norms, repeated heads) become copies of the parameter there, to be compared.

    Raises:
        MappingError: tensor or expert parallelism divides something unevenly.
    """
    _check_even(geometry, heads, mesh)
    for binding in bind(layout, geometry, tied=tied):
        is_stack = binding.rule.op.runs_over == "expert"
        for ep in range(mesh.ep if is_stack else 1):
            for tp in range(mesh.tp):
                cut = _cut_experts if is_stack else _cut_matrix
                pieces = tuple(cut(binding, geometry, heads, mesh, ep, tp))
                shape = tuple(max(stops) for stops in zip(*(piece.stored.stop for piece in pieces), strict=True))
                for stage in stages(binding.name):
                    name = rank_name(mesh.rank(stage, ep, tp), binding.name)
                    yield Binding(name, shape, pieces, binding.rule)


def _check_even(geometry: Geometry, heads: Heads, mesh: NxdMesh) -> None:
    sizes = {"vocab_size": geometry.vocab_size}
    if heads.cuts_hidden:
        sizes["hidden_size"] = geometry.hidden_size
    if geometry.is_moe:
        sizes["moe_intermediate_size"] = geometry.moe_intermediate_size or 0
    else:
        sizes["intermediate_size"] = geometry.intermediate_size or 0
    for axis, size in sizes.items():
        if size % mesh.tp:
            raise MappingError(f"{axis} {size} does not divide among {mesh.tp} tensor ranks, as NxD asks for")
    if mesh.ep > 1 and (geometry.num_experts is None or geometry.num_experts % mesh.ep):
        raise MappingError(f"{geometry.num_experts or 'no'} experts do not divide among {mesh.ep} expert ranks")


def _cut_matrix(binding: Binding, geometry: Geometry, heads: Heads, mesh: NxdMesh, ep: int, tp: int) -> Iterator[Piece]:
    """The runs of rows or columns that a tensor-parallel rank has of each part, part after part."""
    templates = dict(zip(dict.fromkeys(piece.name for piece in binding.pieces), binding.rule.parts, strict=True))
    shapes = {piece.name: piece.box.stop for piece in binding.pieces}
    at = 0
    for name, template in templates.items():
        is_embedding = "embed_tokens" in binding.name  # and not a tied head
        dim, runs = _runs(template, shapes[name], geometry, heads, mesh.tp, tp, is_embedding=is_embedding)
        yield from _join(name, shapes[name], dim, runs, at)
        at += sum(len(run) for run in runs) if dim == 0 else shapes[name][0]


def _cut_experts(
    binding: Binding, geometry: Geometry, heads: Heads, mesh: NxdMesh, ep: int, tp: int
) -> Iterator[Piece]:
    """A rank's experts, of each its intermediate units: gate and up by rows, down by columns, stored transposed."""
    mine = chunk(geometry.num_experts or 0, mesh.ep, ep)
    for piece in binding.pieces:
        expert, _, column = piece.stored.start
        if expert not in mine:
            continue
        dim = int(piece.name.endswith(_DOWN))
        size = list(piece.box.size)
        size[dim] //= mesh.tp
        start = [0, 0]
        start[dim] = tp * size[dim]
        stored = Box((expert - mine.start, 0, column if dim else column // mesh.tp), (1, size[1], size[0]))
        yield Piece(piece.name, Box(tuple(start), tuple(size)), stored, transposed=True)


def _runs(
    template: str, shape: Shape, geometry: Geometry, heads: Heads, tp: int, rank: int, *, is_embedding: bool
) -> tuple[int, Sequence[range]]:
    """The dim that is cut, and the ranges of it that ``rank`` holds, in stored order."""
    if not CUT_BY_TP.intersection(BY_NAME[template].axes):  # norms and the router
        return 0, [range(shape[0])]
    slots = range(rank * len(heads.keys) // tp, (rank + 1) * len(heads.keys) // tp)
    if template in (_K, _V):
        keys = [heads.keys[slot] for slot in slots]
        if len(heads.keys) > geometry.num_key_value_heads:  # apart, so that copies of a head are the same rows
            return 0, [range(key * geometry.head_dim, (key + 1) * geometry.head_dim) for key in keys]
        return 0, _merged(keys, geometry.head_dim)
    if template in (_Q, _O):
        return int(template == _O), _merged([h for slot in slots for h in heads.queries[slot]], geometry.head_dim)
    dim = int(template.endswith(_DOWN) or (is_embedding and heads.cuts_hidden))
    each = shape[dim] // tp
    return dim, [range(rank * each, (rank + 1) * each)]


def _merged(numbers: Sequence[int], size: int) -> list[range]:
    """The rows of heads, those of neighbours as one range."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number * size:
            runs[-1] = range(runs[-1].start, (number + 1) * size)
        else:
            runs.append(range(number * size, (number + 1) * size))
    return runs


def _join(name: str, shape: Shape, dim: int, runs: Sequence[range], at: int) -> Iterator[Piece]:
    """One piece per range, one after another along ``dim``; ``at`` is the first row in the stored tensor."""
    place = 0
    for run in runs:
        start, size, stored = [0] * len(shape), list(shape), [at, *[0] * (len(shape) - 1)]
        start[dim], size[dim] = run.start, len(run)
        stored[dim] += place
        place += len(run)
        yield Piece(name, Box(tuple(start), tuple(size)), Box(tuple(stored), tuple(size)))


def _heads(queries: Queries, keys: tuple[int, ...], heads: int) -> Heads:
    kv, slots = max(keys) + 1, len(keys)
    each, group = heads // slots, heads // kv
    order = []
    for slot in range(slots):
        first = slot * each if queries == "natural" else (slot % kv) * group + (slot // kv) * each
        order.append(tuple(range(first, first + each)))
    return Heads(keys, tuple(order))


def _key_rows(shards: NxdShards, geometry: Geometry) -> tuple[str, int, int]:
    """The first stored tensor that holds keys, the first row of them in it, and how many there are on each rank."""
    for ending in ("qkv_proj.weight_k", "k_proj.weight", "qkv_proj.weight_qkv", "qkv_proj.Wqkv.weight"):
        name = next((fqn for fqn in shards.stages if fqn.endswith(ending)), None)
        if name is None:
            continue
        stored = shards.contents.tensors[rank_name(shards.mesh.rank(shards.stages[name][0], 0, 0), name)]
        rows = stored.spec.shape[0] if stored.spec.shape else 0
        if "qkv" not in ending.rpartition("_proj.")[2]:
            return name, 0, rows
        first = geometry.num_attention_heads * geometry.head_dim // shards.mesh.tp
        return name, first, (rows - first) // 2
    raise MappingError(f"{shards.folder} holds no key projection")


def _key_blocks(shards: NxdShards, name: str, first: int, rows: int, size: int, read: Read) -> list[bytes]:
    """The rows of each slot, over all ranks."""
    blocks = []
    for rank in range(shards.mesh.tp):
        stored = shards.contents.tensors[rank_name(shards.mesh.rank(shards.stages[name][0], 0, rank), name)]
        pitch = stored.spec.nbytes // stored.spec.shape[0]
        place = stored.chunks[0]
        if place.column_major:
            raise SourceError(f"{place.file}: {name} is stored column by column, in which repeated heads are not told")
        for row in range(first, first + rows, size):
            blocks.append(read(place.file, place.offset + row * pitch, size * pitch))
    return blocks


def _repeats(blocks: Sequence[bytes], keys: Sequence[int]) -> bool:
    """Whether slots of one head hold the same bytes, and slots of different heads do not."""
    content: dict[int, bytes] = {}
    if any(content.setdefault(key, block) != block for key, block in zip(keys, blocks, strict=True)):
        return False
    return len(set(content.values())) == len(content)
