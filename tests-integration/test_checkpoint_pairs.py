"""Every ordered pair of optimizers: what a plan takes over is the same mathematics.

`plan_restore` runs on shapes. What it takes is compared with slots, read from Optax itself: a slot
is the record that a leaf is in, its field and its parameter. Several constructors of Optax keep
other things in one class of records: those are distinguished by hand.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import opt_adafactor
import opt_optax_bridge as opt
import pytest
from opt_checkpoint import NamedState, Plan, named_state, plan_restore
from opt_core import FROZEN, MultiOptimizer, Optimizer, OptimizerDef
from optax_table import TABLE, Case, contrib, optax

# What `ScaleByAdamState` and the like are of, where that is not Adam or AdaBelief.
_OTHERS = {name: name for name in ("adamax", "yogi", "radam", "adopt", "acprop")}
_OTHERS["adamaxw"] = "adamax"
_SHARED = {"ScaleByAdamState": "adam", "ScaleByBeliefState": "belief"}
# Classes that differ in a field besides: what they have in common obeys one recurrence.
_ALIKE = {
    "ScaleByAmsgradState": "adam",
    "ScaleByRmsWithCountState": "ScaleByRmsState",
    "ScaleByRStdDevWithCountState": "ScaleByRStdDevState",
    "InjectHyperparamsState": "InjectStatefulHyperparamsState",
    "MultiTransformState": "PartitionState",
}


class Slot(NamedTuple):
    """Equal for two leaves that the same recurrence makes of the same inputs."""

    family: str  # what keeps the leaf
    field: tuple[str, ...]  # the names below the record, without those of the parameter
    parameter: str  # at the top level; empty if it is for all


def slots(constructor: str, state: Any) -> Iterator[Slot]:
    """Yields the slot of every leaf of a state, in the order of JAX."""
    base = constructor.partition(":")[0].rpartition(".")[2].removeprefix("scale_by_")
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        record, depth = _record(state, path)
        family = _ALIKE.get(record, record)
        if record in _SHARED:
            family = _OTHERS.get(base, _SHARED[record])
        inside = [name for name in names if name in PARAMS]
        field = tuple(name for name in names[depth:] if name not in PARAMS)
        yield Slot(family, field, inside[0] if inside else "")


def _record(state: Any, path: Sequence[Any]) -> tuple[str, int]:
    """The class of the innermost record above a leaf, and how deep that is."""
    node, found = state, ("", 0)
    for depth, key in enumerate(path):
        if isinstance(key, jax.tree_util.GetAttrKey):
            found = type(node).__name__, depth
            node = getattr(node, key.name)
        elif isinstance(key, jax.tree_util.DictKey):
            node = node[key.key]
        elif isinstance(key, jax.tree_util.SequenceKey):
            node = node[key.idx]
        else:
            break
    return found


EVERYTHING = frozenset({"initialise", "drop", "cast", "reshape", "regroup", "optimizer"})
PARAMS = {
    "bias": jnp.linspace(-1.0, 1.0, 16),
    "kernel": jnp.linspace(-1.0, 2.0, 256).reshape(16, 16),
}


def _fits(case: Case) -> bool:
    """Whether an optimizer is for these parameters, and its state for all steps."""
    plain = case.wrap(PARAMS) is PARAMS and case.dtype == jnp.float32
    return plain and "bias" not in case.without and not case.grows


def _is_part(name: str) -> bool:
    """Whether another one in the table has it as a part, or it is nobody's but a test's."""
    return bool(re.match(r"(contrib\.)?scale_by_|experimental|user|add_|clip_by|keep_", name))


def chained(*members: Any) -> Callable[[], OptimizerDef]:
    return lambda: opt.OptaxWrapper(optax.chain(*members))


def grouped(kernel: Any, bias: Any) -> Callable[[], OptimizerDef]:
    return lambda: MultiOptimizer.from_rules([("k", "kernel", kernel), ("b", "bias", bias)])


def adafactor(**options: Any) -> Callable[[], OptimizerDef]:
    return lambda: opt_adafactor.Adafactor(1e-2, min_dim_size_to_factor=4, **options)


ADAM = optax.scale_by_adam()
# Settings, orders and places that matter, which the table of all constructors does not have.
VARIANTS: dict[str, Callable[[], OptimizerDef]] = {
    "clip, adam": chained(optax.clip(1.0), ADAM),
    "trust ratio, adam": chained(optax.scale_by_trust_ratio(), ADAM),
    "trace, nesterov": chained(optax.trace(0.9, nesterov=True)),
    "adam, trace": chained(ADAM, optax.trace(0.9)),
    "two ema": chained(optax.ema(0.9), optax.ema(0.5)),
    "two ema, swapped": chained(optax.ema(0.5), optax.ema(0.9)),
    "ema, no debias": chained(optax.ema(0.9, debias=False)),
    "masked: kernel": chained(optax.masked(ADAM, {"kernel": True, "bias": False})),
    "masked: bias": chained(optax.masked(ADAM, {"kernel": False, "bias": True})),
    "MultiSteps: 4": chained(optax.MultiSteps(optax.adamw(1e-2), 4).gradient_transformation()),
    "apply_every: 3": chained(optax.apply_every(3)),
    "contrib.reduce_on_plateau: patience": chained(contrib.reduce_on_plateau(patience=5)),
    "schedule_free: b1": chained(contrib.schedule_free(optax.adam(1e-2), 1e-2, b1=0.5)),
    "sam: 3": chained(contrib.sam(optax.adam(1e-2), contrib.normalize(), sync_period=3)),
    "groups: adam, sgd": grouped(opt.adam(1e-2), opt.sgd(1e-2)),
    "groups: adam, frozen": grouped(opt.adam(1e-2), FROZEN),
    "our Adafactor": adafactor(),
    "our Adafactor: momentum": adafactor(beta1=0.9),
    "our Adafactor: unfactored": adafactor(factored=False),
}
NAMES = (*(name for name, case in TABLE.items() if _fits(case) and not _is_part(name)), *VARIANTS)


@functools.cache
def optimizer_of(name: str) -> Optimizer:
    """As shapes."""
    params = jax.eval_shape(lambda: PARAMS)
    if name in VARIANTS:
        definition = VARIANTS[name]()
    else:
        definition = opt.OptaxWrapper(TABLE[name].build(params))
    made: Optimizer = jax.eval_shape(definition.create, params)
    return made


@functools.cache
def saved_of(name: str) -> NamedState:
    return named_state(optimizer_of(name))


@functools.cache
def slots_of(name: str) -> dict[str, Slot]:
    """What each leaf of the state obeys, by its name in a checkpoint."""
    state = optimizer_of(name).state.param_states
    names = [leaf.name for leaf in saved_of(name).schema.leaves if leaf.kind == "state"]
    found = list(slots(name, state))
    return dict(zip(names[-len(found) :], found, strict=True)) if found else {}


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("source", NAMES)
def test_no_pair_passes_that_is_not_the_same_mathematics(source: str, part: int) -> None:
    saved, own = saved_of(source), slots_of(source)
    for target in {source, *NAMES[part::5]}:
        optimizer = optimizer_of(target)
        plan = plan_restore(saved, optimizer)
        if source == target:
            assert plan.is_exact, str(plan)
        elif plan.is_ok:
            check_slots(own, slots_of(target), plan)
        admitted = plan_restore(saved, optimizer, allow=EVERYTHING)
        if not admitted.is_ok:
            assert admitted.problems or any(row.problem for row in admitted.rows)
            continue
        check_slots(own, slots_of(target), admitted)


def check_slots(own: dict[str, Slot], other: dict[str, Slot], plan: Plan[Any]) -> None:
    """Whatever is admitted, a leaf goes on as what it was; a new schedule takes the updates."""
    updates = {"state/step", "state/multi_steps/gradient_step"}
    for row in plan.target_rows:
        is_new_schedule = row.note.startswith("a new count")
        for name in row.sources:
            if is_new_schedule:
                assert name in updates
            elif row.leaf.name in other:
                assert own[name] == other[row.leaf.name], f"{row.leaf.name} <- {name}"
