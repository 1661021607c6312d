"""Planning of the memory per device of a training step, before anything is allocated."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey

from opt_partition._explain import explain
from opt_partition._init import StateMaker
from opt_partition._layout import (
    AnyMesh,
    Layout,
    LeafLayout,
    distinct_axes,
    mesh_axes_of,
    named_sizes,
)
from opt_partition._logical_to_mesh import (
    LogicalAxisRules,
    MemoryKinds,
    logical_to_mesh,
    rule_pairs,
)
from opt_partition._plan import NO_PARAMETER, Kind, MemoryPlan, PlanRow
from opt_partition._rules import Rule
from opt_partition._trees import children, key_name
from opt_partition._zero import extended, report_replicated


def memory_plan(
    tx: StateMaker,
    params: Any,
    param_axes: Any,
    rules: LogicalAxisRules,
    mesh: AnyMesh,
    *,
    zero: str | Sequence[str] | None = None,
    zero_level: Literal[1, 2] = 1,
    zero_min_bytes: int = 0,
    grad_dtype: Any = None,
    accumulate: Any = None,
    group_by: Callable[[str], str] | None = None,
    memory_kinds: MemoryKinds = None,
    derivation_rules: Mapping[Any, Rule] | None = None,
    strict: bool = False,
    on_indivisible: Literal["replicate", "error"] = "replicate",
    on_unknown: Literal["error", "replicate"] = "error",
) -> MemoryPlan:
    """Plans the memory of a training step: parameters, gradients, accumulators, optimizer state.

    Allocates nothing and uses no device; the mesh may be an `AbstractMesh` of any size. The plan
    counts, to the byte, the arrays that a step takes and returns, but neither activations nor the
    padding and temporary buffers of a compiler.

    Args:
      tx: the transformation, its `init`, or a definition; see `explain`.
      params: arrays or `jax.ShapeDtypeStruct`s.
      param_axes: logical axes of each parameter; see `derive_logical_axes`.
      rules: rules from logical names to mesh axes; see `logical_to_mesh`.
      mesh: the mesh.
      zero: mesh axes to shard the optimizer state over; see `extend_over`.
      zero_level: 1 for the state only; 2 for gradients and accumulators too.
      zero_min_bytes: minimum size of the leaves to which `zero` applies.
      grad_dtype: dtype of the gradients; by default, that of each parameter. Complex parameters
        keep theirs if it is real, with a note; gradients of integers take no memory (float0).
      accumulate: dtype of gradient accumulators, sharded like the gradients, besides those in `tx`
        such as of `optax.MultiSteps`.
      group_by: returns the group of a parameter for its path; by default, the first key.
      memory_kinds: memory kinds of the state leaves; see `logical_to_mesh`.
      derivation_rules: `rules` of `explain`.
      strict: see `explain` and `extend_over`.
      on_indivisible: see `logical_to_mesh`.
      on_unknown: see `logical_to_mesh`.

    Returns:
      The plan. A transformation with a method `temporary_bytes`, of the shards of the parameters on
      a device, is asked for those.

    Warns:
      ReplicatedWarning: see `extend_over`; once, for all that `zero` applies to.

    Raises:
      ValueError: `zero_level`, `grad_dtype` or `accumulate` is not valid. For other errors, see
        `explain`, `logical_to_mesh` and `extend_over`.

    Examples:
      >>> import optax
      >>> plan = memory_plan(
      ...     optax.adam(1e-3),
      ...     {'wi': jax.ShapeDtypeStruct((1024, 4096), 'float32')},
      ...     {'wi': ('embed', 'mlp')},
      ...     [('mlp', 'model'), ('embed', None)],
      ...     jax.sharding.AbstractMesh((64, 8), ('data', 'model')),
      ...     zero='data',
      ... )
      >>> plan.params.bytes_per_device, plan.state.bytes_per_device
      (2097152, 65540)
      >>> plan.state_fields
      {'ScaleByAdamState.count': 4, 'ScaleByAdamState.mu': 32768, 'ScaleByAdamState.nu': 32768}
      >>> [(row.leaf.path, row.reason) for row in plan.replicated][:1]
      [('wi', "not over data=64: no rule shards 'embed'; no rule uses 'data'")]
    """
    over = distinct_axes("`zero`", zero, mesh) if zero else ()
    if zero_level not in (1, 2) or (zero_level == 2 and not over):
        raise ValueError(
            f"`zero_level` must be 1, or 2 together with `zero`; found {zero_level!r} with "
            f"`zero={zero!r}`. Name the mesh axes in `zero`, e.g. 'data'."
        )
    _check_dtype("grad_dtype", grad_dtype)
    _check_dtype("accumulate", accumulate)
    # Read several times (parameters, state, reasons), so an iterator would be exhausted.
    pairs = rule_pairs(rules)
    explanation = explain(tx, params, param_axes, rules=derivation_rules, strict=strict)
    lay = functools.partial(
        logical_to_mesh,
        rules=pairs,
        mesh=mesh,
        on_indivisible=on_indivisible,
        on_unknown=on_unknown,
    )
    layouts: dict[Kind, Layout] = {"params": lay(explanation.param_axes, shapes=params)}
    layouts["grads"] = _of_gradients(layouts["params"], grad_dtype)
    if accumulate is not None:
        layouts["accumulators"] = _of_gradients(layouts["grads"], accumulate)
    layouts["state"] = lay(explanation.axes, shapes=explanation.state, memory_kinds=memory_kinds)
    kept = {"params"} if zero_level == 2 else {"params", "grads", "accumulators"}
    if over:
        further = [kind for kind in layouts if kind not in kept]
        layouts |= {kind: extended(layouts[kind], over, zero_min_bytes) for kind in further}
        rest = sum(layout.bytes_per_device for kind, layout in layouts.items() if kind in kept)
        extended_layouts = [layouts[kind] for kind in further]
        report_replicated(extended_layouts, over, zero_min_bytes, strict=strict, other_bytes=rest)

    param_axes = [tuple(spec) for spec in jax.tree.leaves(explanation.param_axes)]
    paths = [leaf.path for leaf in layouts["params"].rows]
    state_fields = _state_fields(explanation.state, params)
    group_of = group_by or (lambda path: path.split("/", 1)[0])
    rows: list[PlanRow] = []
    about: list[tuple[tuple[Any, ...], str | None, str]]
    for kind, layout in layouts.items():
        about = [(axes, path, kind) for axes, path in zip(param_axes, paths, strict=True)]
        if kind == "state":
            fields = zip(explanation.rows, state_fields, strict=True)
            about = [(row.axes, row.parameter, field) for row, field in fields]
        reason = functools.partial(
            _reason, mesh, pairs, () if kind in kept else over, zero_min_bytes
        )
        for leaf, (axes, parameter, field) in zip(layout.rows, about, strict=True):
            group = NO_PARAMETER if parameter is None else group_of(parameter)
            waste = leaf.bytes_per_device - -(-leaf.bytes // mesh.size)
            why = reason(leaf, axes) if waste else ""
            rows.append(PlanRow(kind, leaf, axes, parameter, group, field, waste, why))
    temporary_bytes = getattr(tx, "temporary_bytes", None)
    shards = [jax.ShapeDtypeStruct(x.shard_shape, x.dtype) for x in layouts["params"].rows]
    return MemoryPlan(
        mesh=mesh,
        params=layouts["params"],
        grads=layouts["grads"],
        accumulators=layouts.get("accumulators"),
        state=layouts["state"],
        rows=tuple(rows),
        explanation=explanation,
        zero=over,
        zero_level=zero_level,
        temporary_bytes=int(temporary_bytes(shards)) if callable(temporary_bytes) else None,
    )


def _reason(
    mesh: AnyMesh,
    rules: Sequence[tuple[str, Any]],
    zero: Sequence[str],
    zero_min_bytes: int,
    leaf: LeafLayout,
    axes: tuple[Any, ...],
) -> str:
    """Returns why a leaf is not sharded further."""
    used = {axis for entry in leaf.spec for axis in mesh_axes_of(entry)}
    free = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]
    where = f"not over {named_sizes(mesh, free)}"
    if not leaf.shape:
        return f"{where}: a scalar"
    why = list(leaf.notes)
    sharded = {name for name, to in rules if mesh_axes_of(to)}
    names = dict.fromkeys(name for entry in axes for name in mesh_axes_of(entry))
    if whole := [name for name in names if name not in sharded]:
        why.append("no rule shards " + ", ".join(map(repr, whole)))
    if not names:
        why.append("no dimension has a logical name")
    if zero and leaf.bytes < zero_min_bytes:
        why.append(f"ZeRO: {leaf.bytes:,} bytes are below min_bytes={zero_min_bytes:,}")
    usable = {axis for _, to in rules for axis in mesh_axes_of(to)}.union(zero)
    if idle := [axis for axis in free if axis not in usable]:
        why.append("no rule uses " + ", ".join(map(repr, idle)))
    return f"{where}: {'; '.join(why)}" if why else where


def _check_dtype(argument: str, dtype: Any) -> None:
    """Raises `ValueError` if gradients cannot have a dtype."""
    if dtype is None:
        return
    with contextlib.suppress(TypeError):  # it is none
        dtype = jax.numpy.dtype(dtype)
        if jax.numpy.issubdtype(dtype, np.inexact):
            return
    raise ValueError(
        f"`{argument}` must be a floating-point or complex dtype, e.g. 'bfloat16'; found {dtype}"
    )


def _of_gradients(layout: Layout, asked: Any) -> Layout:
    """Returns the layout of parameters with the dtypes of their gradients."""

    def change(leaf: LeafLayout) -> LeafLayout:
        dtype, notes = leaf.dtype, leaf.notes
        if not jax.numpy.issubdtype(dtype, np.inexact):
            dtype = jax.dtypes.float0
        elif asked is not None:
            to_complex = jax.numpy.issubdtype(asked, np.complexfloating)
            if jax.numpy.issubdtype(dtype, np.complexfloating) == to_complex:
                dtype = jax.numpy.dtype(asked)
            else:
                kind = "complex" if to_complex else "real"
                notes += (f"the gradient keeps {dtype}, as {jax.numpy.dtype(asked)} is {kind}",)
        return dataclasses.replace(leaf, dtype=dtype, notes=notes)

    return Layout(layout.mesh, jax.tree.map(change, layout.leaves))


def _state_fields(state: Any, params: Any) -> list[str]:
    """Returns the field name of every leaf of an optimizer state, e.g. `ScaleByAdamState.mu`.

    This is the innermost field whose container type does not occur in the parameters, so that `mu`
    of an Equinox model is a single field. Other leaves are named after their first string key.
    """
    of_params: set[type] = set()

    def is_leaf(node: Any) -> bool:
        of_params.add(type(node))
        return False

    jax.tree.leaves(params, is_leaf=is_leaf)

    def walk(node: Any, field: str, key: str) -> Iterator[str]:
        opened = children(node)
        if opened is None:  # a leaf, or `None`
            yield from [field or key or type(node).__name__] * len(jax.tree.leaves(node))
            return
        for child_key, child in opened:
            below, name = field, key
            is_field = isinstance(child_key, GetAttrKey | FlattenedIndexKey)
            if is_field and type(node) not in of_params:
                below = f"{type(node).__name__}.{key_name(child_key)}"
            if isinstance(child_key, DictKey) and isinstance(child_key.key, str):
                name = key or child_key.key
            yield from walk(child, below, name)

    return list(walk(state, "", ""))
