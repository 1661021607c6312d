"""Every transformation of the installed Optax says what its state means."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from opt_checkpoint import named_state
from opt_core import Optimizer, StateDescription, describe_state
from opt_core.extend import path_str
from opt_optax_bridge import OptaxWrapper
from opt_partition import explain
from opt_precision import identity, moments
from opt_precision._init import First
from optax_table import TABLE

PARAMS: dict[str, Any] = {
    "b": jnp.arange(8.0),
    "deep": {"k": jnp.ones((8, 16))},
    "w": jnp.arange(64.0).reshape(8, 8),
}
OPTAX = [name for name in TABLE if not name.startswith("user")]
GOLDEN = Path(__file__).parent / "goldens" / "state_names.json"


@functools.cache
def built(name: str) -> Optimizer:
    case = TABLE[name]
    params = case.wrap({k: v for k, v in PARAMS.items() if k not in case.without})
    params = jax.tree.map(lambda x: x.astype(case.dtype), params)
    return OptaxWrapper(case.build(params)).create(params)


@functools.cache
def found(name: str) -> StateDescription:
    return describe_state(built(name))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", TABLE)
def test_names_stay_what_they_were(name: str) -> None:
    """Those in the checkpoints of the first versions, which profiled `init` for them."""
    names = [leaf.name for leaf in named_state(built(name)).schema.leaves if leaf.kind == "state"]
    assert [n for n in names if n != "state/step"] == json.loads(GOLDEN.read_text())[name]


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", OPTAX)
def test_what_precision_takes_for_a_moment_is_described_as_one(name: str) -> None:
    definition: Any = built(name).optimizer_def
    first = First(definition.optax_optimizer, built(name).target)
    for leaf, planned in zip(found(name).leaves, first.plan(identity(), moments()), strict=True):
        role, reason = planned.choice
        if role is not None:
            assert role.removeprefix("slow_") == leaf.role, planned.path
        elif leaf.role.endswith("moment"):
            assert not reason.startswith("in no list"), planned.path


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", OPTAX)
def test_every_transformation_of_optax_is_known(name: str) -> None:
    described = found(name)
    helpers = {"optax_table.first"}  # of the table itself
    unknown = {m.name for m in described.transformations if m.source == "types"} - helpers
    assert not unknown, "say what it keeps in `_description/known.py`, and audit its settings"
    assert not [leaf for leaf in described.leaves if leaf.source == "types"]
    assert described.transformations or name.partition(":")[0] in ("identity", "freeze", "masked")


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", TABLE)
def test_stated_dimensions_are_those_that_tracing_finds(name: str) -> None:
    optimizer = built(name)
    definition: Any = optimizer.optimizer_def
    numbers = jax.tree.map(lambda x: PartitionSpec(*map(str, range(np.ndim(x)))), optimizer.target)
    rows = explain(definition.optax_optimizer, optimizer.target, numbers).rows
    leaves = found(name).leaves
    assert len(rows) == len(leaves)
    for row, leaf in zip(rows, leaves, strict=True):
        is_sure = row.source not in ("fallback", "scalar") and "capped at" not in row.note
        if leaf.parameter is not None and is_sure and row.parameter == path_str(leaf.parameter):
            assert leaf.dimensions == row.dims, (leaf, row)
