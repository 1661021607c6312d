"""Shardings of parameters and optimizer state: planned before they exist, checked in the program.

Nothing here allocates: a plan needs only shapes, and a compiled step is read, not run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from opt_core import Optimizer, OptimizerDef, OptimizerState
from opt_partition import Expected, MemoryPlan, Report, memory_plan, verify
from opt_precision import partition_rules

from lm.model import AXIS_RULES

SHOWN_NOTES = 3


@dataclasses.dataclass(frozen=True)
class Placement:
    """The planned optimizer, before it is created.

    Attributes:
      plan: how every parameter and every leaf of the state is sharded, and the bytes.
      optimizer: the optimizer, of `jax.ShapeDtypeStruct`s that carry their shardings.
    """

    plan: MemoryPlan
    optimizer: Optimizer

    @property
    def shardings(self) -> Any:
        """The optimizer with a sharding in place of every leaf."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.optimizer)


def place(optimizer_def: OptimizerDef, params: Any, mesh: Mesh, *, zero: bool) -> Placement:
    """Says where every leaf belongs: state that follows a parameter is split as that is.

    Args:
      optimizer_def: the definition.
      params: `jax.ShapeDtypeStruct`s in Flax's boxes, which name their dimensions.
      mesh: the devices.
      zero: whether state is sharded over `data`, too, as no parameter is (ZeRO-1).
    """

    def init(params: Any) -> Any:
        return optimizer_def.init_state(params).param_states

    plan = memory_plan(
        optax.GradientTransformation(init, optax.identity().update),  # only its state is planned
        nn.unbox(params),
        params,
        AXIS_RULES,
        mesh,
        zero="data" if zero else None,
        group_by=lambda path: path.split("/")[0].split("_")[0],  # all layers together
        derivation_rules=partition_rules(),
    )
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    state = OptimizerState(step=step, param_states=plan.state.shapes)
    return Placement(plan, Optimizer(optimizer_def, state, plan.params.shapes))


def describe_plan(plan: MemoryPlan) -> str:
    """Returns what a device will hold, in a few lines; `print(plan)` shows all of it."""
    parts = {
        "parameters": (plan.params.bytes_per_device, plan.params.bytes),
        "gradients": (plan.grads.bytes_per_device, plan.grads.bytes),
        "state": (plan.state.bytes_per_device, plan.state.bytes),
    }
    shares = (f"{name} {amount(held)} of {amount(all_)}" for name, (held, all_) in parts.items())
    groups = {name: group["total"] for name, group in plan.groups.items()}
    together = amount(plan.total_bytes_per_device)
    waste = amount(sum(row.waste for row in plan.replicated))
    number = sum(leaf.size for leaf in jax.tree.leaves(plan.params.shapes))
    each = (plan.params.bytes + plan.state.bytes) / number
    lines = [
        f"Plan for each device: {', '.join(shares)}",
        f"  state by field: {_amounts(plan.state_fields)}",
        f"  all by group: {_amounts(groups)}",
        f"  total {together}, {waste} of it beyond an equal share; {each:.2f} bytes per parameter",
    ]
    return "\n".join([*lines, *_notes(plan)])


def _notes(plan: MemoryPlan) -> list[str]:
    """Returns notes on requests that could not be satisfied."""
    notes = [*plan.notes]
    if "data" in plan.zero and plan.mesh.shape["data"] == 1:
        notes.insert(0, "--zero changes nothing: data=1 leaves one device for all of the state")
    more = len(notes) - SHOWN_NOTES
    lines = [f"  note: {note}" for note in notes[:SHOWN_NOTES]]
    return [*lines, f"  {more} more notes"] if more > 0 else lines


def describe_bytes(
    plan: MemoryPlan, optimizer: Optimizer, tx: optax.GradientTransformation
) -> tuple[dict[str, dict[str, int]], str]:
    """Returns bytes a device: planned, held, and those of `tx` without a plan; and a table of them.

    Args:
      plan: computed before anything was allocated.
      optimizer: live.
      tx: its state is created, for parameters in float32 sharded like those of `optimizer`.
    """
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), optimizer.target)
    rows = {
        "planned": (plan.params.bytes_per_device, plan.state.bytes_per_device),
        "held": (held(optimizer.target), held(optimizer.state.param_states)),
        "plain Optax": (held(params), held(tx.init(params))),
    }
    table = [f"{'Bytes per device':<16}{'parameters':>12}{'state':>12}{'both':>12}"]
    for name, (of_params, of_state) in rows.items():
        counts = (of_params, of_state, of_params + of_state)
        table.append(f"  {name:<14}" + "".join(f"{amount(count):>12}" for count in counts))
    named = {k: dict(zip(("parameters", "state"), row, strict=True)) for k, row in rows.items()}
    return named, "\n".join(table)


def held(tree: Any) -> int:
    """Returns the bytes of live arrays on the device of this process that holds most."""
    counts: Counter[jax.Device] = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            counts[shard.device] += shard.data.nbytes
    return max(counts.values())


def check_step(
    step: jax.stages.Compiled,
    placement: Placement,
    state_gathers: Literal["any", "error"] = "error",
) -> Report:
    """Reads in the compiled `train_step` whether it does what `placement` says.

    Args:
      step: the program.
      placement: the plan.
      state_gathers: `'any'` for optimizers that need whole matrices.

    Raises:
      ShardingMismatchError: it does not, gathers state, or wastes gradients that it has summed.
    """
    expected = Expected(
        inputs=(placement.shardings,),
        outputs=(placement.shardings,),
        params="0/target",
        state="0/state/param_states",
    )
    return verify(step, expected, state_gathers=state_gathers)


def describe_report(report: Report) -> str:
    """Returns what a checked step sends, in two lines; `print(report)` shows all of it."""
    counts: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for row in report.collectives:
        counts[row.kind] += row.count
        sent[row.kind] += row.total_bytes
    moved = (f"{n} {kind} {amount(sent[kind])}" for kind, n in counts.most_common())
    found = Counter((finding.severity, finding.kind) for finding in report.findings)
    said = "".join(f"; {severity}: {n} x {kind}" for (severity, kind), n in found.items())
    return (
        "Checked the compiled step: state sharded as asked, "
        f"{amount(report.bytes_per_device('state'))} per device{said}\n"
        f"  sent per device and step: {', '.join(moved) or 'nothing'}"
    )


def amount(count: int) -> str:
    """Formats a number of bytes."""
    if count < 1024:
        return f"{count} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min((count.bit_length() - 1) // 10, len(units))
    return f"{count / 1024**power:,.1f} {units[power - 1]}"


def _amounts(items: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {amount(count)}" for name, count in items.items())
