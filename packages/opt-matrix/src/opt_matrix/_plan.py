"""Which devices compute with which matrices, and what it costs: from shapes alone."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from opt_matrix._groups import Group, Kind, LeafLayout, Way, best_way, group_of, leaf_layout, size
from opt_matrix._matrices import Dims, Matrices, leaves_by_path
from opt_matrix._newton_schulz import is_positive_integer, newton_schulz
from opt_matrix.errors import OptionError, PlanError, PlanMismatchError

MAX_GROUP_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixPlan:
    """Who computes with which matrices; see `plan_matrices`.

    Attributes:
      groups: in the order in which they run.
      layouts: how each leaf with matrices lies, by path.
      rest: paths of the other leaves.
      mesh: the mesh, with devices or without.
      fn: what is computed.
      max_group_bytes: the bound on the temporaries of a group.
      min_group_bytes: the smallest bound that can be met, which holds where it is larger.
    """

    groups: tuple[Group, ...]
    layouts: Mapping[str, LeafLayout]
    rest: tuple[str, ...]
    mesh: Mesh | AbstractMesh
    fn: Any
    max_group_bytes: int
    min_group_bytes: int

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Size of each axis of the mesh."""
        return dict(self.mesh.shape)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the results of all collectives."""
        return sum(group.bytes_per_device for group in self.groups)

    @property
    def flops_per_device(self) -> float:
        """Floating-point operations of all groups."""
        return sum(group.flops_per_device for group in self.groups)

    @property
    def temp_bytes(self) -> int:
        """The largest of the groups' temporaries: they run one after the other."""
        return max((group.temp_bytes for group in self.groups), default=0)

    def check(self, compiled: Any) -> None:
        """Holds a compiled program against the plan; needs the extra `opt-matrix[partition]`.

        Args:
          compiled: what `jax.jit(f).lower(...).compile()` returns, of any `f` that updates with
            this plan.

        Raises:
          PlanMismatchError: the groups have more collectives than planned, or move more bytes, or
            none of the planned collectives is there.
        """
        try:
            from opt_partition import read_collectives
        except ImportError:
            raise OptionError(
                "`check` reads the program with opt-partition: install `opt-matrix[partition]`"
            ) from None
        count = size = 0
        lines = []
        for row in read_collectives(compiled):
            if group := self._group_of(row):
                moved = math.prod(row.shape) * _itemsize(row.dtype)
                count, size = count + row.count, size + round(row.count * moved)
                array = f"{row.dtype}{[*row.shape]}"
                lines.append(f"  {group.leaves[0]}: {row.count} x {row.kind} {array} {row.name}")
        planned = sum(group.collectives for group in self.groups)
        if count > planned or size > self.bytes_per_device or (planned and not count):
            raise PlanMismatchError(
                f"planned {planned} collectives and {self.bytes_per_device:,} bytes, found {count} "
                f"and {size:,}; is the program of this plan?\n" + "\n".join(lines)
            )

    def _group_of(self, row: Any) -> Group | None:
        """The first group that a collective serves; `None` where it is of something else."""
        numbers = [int(number) for number in _SCOPE.findall(row.op_name)]
        if not numbers or max(numbers) >= len(self.groups):
            return None
        groups = [self.groups[number] for number in sorted(numbers)]
        # XLA may combine sums of groups with one another, and with others such as that of the loss.
        is_mixed = row.op_name.count(":") >= len(numbers)
        is_own = not is_mixed or row.shape[:1] in {(group.count,) for group in groups}
        return groups[0] if is_own else None

    def __str__(self) -> str:
        """A row for each group between a line on all leaves and one on all groups."""
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh_shape.items())
        rows = [_HEAD, *_rows(self.groups)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        collectives = sum(group.collectives for group in self.groups)
        ideal = sum(group.ideal_flops for group in self.groups) or 1.0
        above = (
            f"matrices on a mesh of {mesh}; leaves: {len(self.layouts)}, groups: "
            f"{len(self.groups)}, rest: {len(self.rest)}"
        )
        below = (
            f"each device: {_bytes(self.bytes_per_device)} in {collectives} collectives, "
            f"{self.flops_per_device:.3g} FLOP ({self.flops_per_device / ideal:.2f} of the ideal), "
            f"{_bytes(self.temp_bytes)} of temporaries at most"
        )
        if self.min_group_bytes > self.max_group_bytes:
            below += (
                f"; `max_group_bytes` asks for {_bytes(self.max_group_bytes)}, and the smallest "
                f"bound that can be met is {_bytes(self.min_group_bytes)}"
            )
        return "\n".join([above, *lines, below])

    def numbers(self, group: Group) -> np.ndarray:
        """Returns the number of each matrix in a group's stack; -1 is padding.

        Numbers go through the leaves whose matrices have one shape, in the order of the tree. They
        do not depend on the mesh.
        """
        offsets, end = dict[str, int](), 0
        for path, layout in self.layouts.items():
            if layout.kind.family == group.kind.family:
                offsets[path], end = end, end + layout.count
        rows = [
            offsets[path] + self.layouts[path].batch_numbers(self.mesh_shape)[:, start:stop]
            for path, (start, stop) in zip(group.leaves, group.parts, strict=True)
        ]
        stack = np.concatenate(rows, axis=1)
        padded = np.pad(stack, ((0, 0), (0, group.padding)), constant_values=-1)
        return padded.reshape(-1).astype(np.int32)

    def dims_of(self, paths: Iterable[str]) -> dict[str, Dims | None]:
        """Returns the dimensions of the matrices of these leaves; `None` for rest.

        Raises:
          PlanError: there are leaves that were not planned for.
        """
        known = dict.fromkeys(self.rest) | {p: layout.dims for p, layout in self.layouts.items()}
        paths = list(paths)
        if unknown := [path for path in paths if path not in known]:
            raise PlanError(f"the plan was made without these leaves: {unknown}")
        return {path: known[path] for path in paths}


def plan_matrices(
    params: Any,
    shardings: Any,
    mesh: Mesh | AbstractMesh,
    matrices: Matrices,
    *,
    fn: Any = None,
    max_group_bytes: int = MAX_GROUP_BYTES,
    world_axes: Sequence[str] | None = None,
    split_axes: Sequence[str] = (),
) -> MatrixPlan:
    """Plans who computes with which matrices; nothing is allocated.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      shardings: for each leaf a `NamedSharding`, a `PartitionSpec`, or `None` for replicated; a
        tree with the same keys, or one for all.
      mesh: may be an `AbstractMesh`.
      matrices: which leaves hold matrices.
      fn: what is computed with stacks of matrices; `newton_schulz()` by default.
      max_group_bytes: bounds the temporaries of a group on a device. One matrix for each device is
        the least: `min_group_bytes` of the plan is the smallest bound that can be met.
      world_axes: the mesh axes that whole matrices may be handed out over, all by default; leave
        out those between slow networks.
      split_axes: the mesh axes that matrices stay cut over, for large matrices that are fewer than
        devices: each step of an iteration is an all-reduce. Matrices whose larger side these axes
        do not divide, and those side by side in one leaf, are handed out all the same.

    Raises:
      UndecidedError: `matrices` does not decide a leaf.
      PlanError: parameters, shardings and mesh do not fit together.
      OptionError: an argument has no such value.

    Examples:
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = AbstractMesh((8,), ('x',))
      >>> params = {f'w{n}': jax.ShapeDtypeStruct((256, 512), 'float32') for n in range(16)}
      >>> plan = plan_matrices(params, P('x', None), mesh, Matrices.by_rank2())
      >>> [(group.choice, group.collectives, group.bytes_per_device) for group in plan.groups]
      [('all_to_all', 2, 1048576)]
    """
    fn = newton_schulz() if fn is None else fn
    if not is_positive_integer(max_group_bytes):
        raise OptionError(
            f"`max_group_bytes` must be a positive integer; got {max_group_bytes!r}. With "
            "`optax.inject_hyperparams` name it among `static_args`"
        )
    sizes = dict(mesh.shape)
    world = tuple(sizes) if world_axes is None else tuple(world_axes)
    for name, axes in {"world_axes": world, "split_axes": split_axes}.items():
        if unknown := [axis for axis in axes if axis not in sizes]:
            raise OptionError(f"`{name}`: {unknown} are not axes of the mesh, which has {[*sizes]}")
    if split_axes and not all(hasattr(fn, name) for name in ("split", "split_bytes", "flops")):
        raise OptionError(
            f"`split_axes` is {tuple(split_axes)}, and {fn!r} needs whole matrices: only functions "
            "with `split`, `split_bytes` and `flops`, as `newton_schulz` has, can do with parts"
        )
    decided = matrices.resolve(params)
    by_path = _shardings_by_path(params, shardings)
    layouts = {
        path: leaf_layout(path, leaf, dims, by_path[path], sizes, getattr(fn, "dtype", None))
        for path, leaf in leaves_by_path(params).items()
        if (dims := decided[path]) is not None
    }
    members: dict[Kind, list[tuple[str, int]]] = {}  # with the number of matrices on a device
    for path, layout in layouts.items():
        if count := layout.count // size(sizes, layout.kind.batch_axes):
            members.setdefault(layout.kind, []).append((path, count))
    drafts: list[tuple[Kind, Way, dict[int, int]]] = []
    for kind, counts in members.items():
        total = sum(count for _, count in counts)
        way = best_way(kind, total, sizes, world, split_axes, fn)
        drafts.append((kind, way, _bytes_by_rounds(kind, way, total, sizes, fn)))
    least = max((min(needed.values()) for _, _, needed in drafts), default=0)
    bound = max(least, max_group_bytes)
    groups: list[Group] = []
    for kind, way, needed in drafts:
        rounds = next(rounds for rounds, most in needed.items() if most <= bound)
        for pieces in _cut(members[kind], rounds * size(sizes, way.share)):
            paths, parts = zip(*pieces, strict=True)
            group = group_of(kind, way, sum(stop - start for start, stop in parts), sizes, fn)
            groups.append(dataclasses.replace(group, leaves=paths, parts=parts))
    rest = tuple(path for path, dims in decided.items() if dims is None)
    return MatrixPlan(tuple(groups), layouts, rest, mesh, fn, max_group_bytes, least)


def _bytes_by_rounds(
    kind: Kind, way: Way, total: int, mesh: dict[str, int], fn: Any
) -> dict[int, int]:
    """The temporaries for each even cut into groups, by the rounds of the largest of them."""
    workers = size(mesh, way.share)
    rounds = -(-total // workers)
    # 1, 2, ... groups of even size: an uneven last one would be mostly padding.
    cuts = dict.fromkeys(-(-rounds // number) for number in range(1, rounds + 1))

    def temp_bytes(most: int) -> int:
        # The last group has what is left; of a single matrix more is kept than of two.
        last = rounds % most or most
        return max(group_of(kind, way, n * workers, mesh, fn).temp_bytes for n in {most, last})

    return {most: temp_bytes(most) for most in cuts}


def _cut(counts: Sequence[tuple[str, int]], most: int) -> list[list[tuple[str, tuple[int, int]]]]:
    """Cuts leaves of so many matrices, in order, into groups of at most `most`."""
    groups: list[list[tuple[str, tuple[int, int]]]] = [[]]
    room = most
    for path, count in counts:
        start = 0
        while start < count:
            if not room:
                groups.append([])
                room = most
            stop = min(count, start + room)
            groups[-1].append((path, (start, stop)))
            room -= stop - start
            start = stop
    return groups


def _shardings_by_path(params: Any, shardings: Any) -> dict[str, Any]:
    paths = leaves_by_path(params)
    if shardings is None or (not isinstance(shardings, Mapping | list) and _is_sharding(shardings)):
        return dict.fromkeys(paths, shardings)
    by_path = leaves_by_path(shardings, is_leaf=_is_sharding)
    if missing := [path for path in paths if path not in by_path]:
        raise PlanError(f"`shardings`: nothing is given for {missing}; `None` is replicated")
    return {path: by_path[path] for path in paths}


def _is_sharding(node: Any) -> bool:
    return node is None or isinstance(node, jax.sharding.Sharding | jax.sharding.PartitionSpec)


_HEAD: tuple[str, ...] = (
    *("leaves", "groups", "matrices", "choice", "axes"),
    *("collectives", "FLOP / ideal", "temporary"),
)


def _rows(groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """A row for each group; one for all that differ in nothing but the leaves."""
    alike: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        kind, axes = group.kind, dataclasses.asdict(group.way).items()
        each = f" on each of {','.join(kind.batch_axes)}" if kind.batch_axes else ""
        cells: tuple[str, ...] = (
            f"{group.count} x [{kind.fan_in}, {kind.fan_out}] {kind.dtype}{each}",
            group.choice,
            "; ".join(f"{do} {','.join(names)}" for do, names in axes if names) or "-",
            f"{_bytes(group.bytes_per_device)} in {group.collectives}",
            f"{group.flops_per_device / group.ideal_flops:.2f}",
            _bytes(group.temp_bytes),
        )
        alike.setdefault(cells, []).append(group)
    rows: list[tuple[str, ...]] = []
    for cells, members in alike.items():
        paths = list(dict.fromkeys(path for group in members for path in group.leaves))
        more = f" + {len(paths) - 1}" if len(paths) > 1 else ""
        rows.append((f"{paths[0]}{more}", str(len(members)), *cells))
    return rows


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


_SCOPE = re.compile(r"\bopt_matrix\.(\d+)\b")


def scope(number: int) -> str:
    """The name that instructions of a group carry through compilation."""
    return f"opt_matrix.{number}"


def _itemsize(dtype: str) -> float:
    """Bytes of an element, by HLO's name, as `bf16`."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1.0
