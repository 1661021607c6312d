"""ZeRO-1 on the parameters whose shardings MaxText records for its own comparisons."""

import json
import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from opt_partition import shard_optimizer_state

FACTS = json.loads((Path(__file__).parent / "goldens" / "maxtext_shardings.json").read_text())
RULES = FACTS["rules"]
DATA = 4
CONTRIB: Any = optax.contrib
each_model = pytest.mark.parametrize("model", FACTS["models"])


def mesh_of(model: str, data: int) -> AbstractMesh:
    sizes = {**FACTS["models"][model]["mesh"], "data": data}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def boxed_params(model: str) -> Any:
    """As `jax.eval_shape(model.init, ...)` returns them."""
    return {
        path: nn.LogicallyPartitioned(jax.ShapeDtypeStruct(tuple(shape), "float32"), tuple(axes))
        for path, shape, axes, _ in FACTS["models"][model]["params"]
    }


def spec_of(entries: list[Any]) -> P:
    return P(*(tuple(entry) if isinstance(entry, list) else entry for entry in entries))


def without_data(spec: P) -> list[set[str]]:
    """The mesh axes of each dimension."""
    groups = [{entry} if isinstance(entry, str) else {*(entry or ())} for entry in spec]
    return [group - {"data"} for group in groups]


@each_model
def test_the_rules_shard_as_in_maxtext(model: str) -> None:
    layouts = shard_optimizer_state(
        optax.adamw(1e-3), boxed_params(model), RULES, mesh_of(model, data=1), "data"
    )
    for path, _, _, entries in FACTS["models"][model]["params"]:
        assert layouts.compute.specs[path] == spec_of(entries), path
        for specs in (layouts.params.specs, layouts.opt_state.specs[0].mu):
            assert without_data(specs[path]) == without_data(spec_of(entries)), path


def first_that_fits(shape: tuple[int, ...], spec: P, mesh: AbstractMesh) -> int:
    """Elements per device if `data` goes to the first dimension that admits it: MaxText's rule."""
    groups = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    shard = [
        size // math.prod(mesh.shape[axis] for axis in group)
        for size, group in zip(shape, groups, strict=True)
    ]
    fits = [
        size % mesh.shape["data"] == 0 and "tensor" not in group
        for size, group in zip(shard, groups, strict=True)
    ]
    return int(math.prod(shard) // (mesh.shape["data"] if any(fits) else 1))


@each_model
def test_adam_takes_no_more_than_in_maxtext(model: str) -> None:
    mesh = mesh_of(model, DATA)
    layouts = shard_optimizer_state(optax.adamw(1e-3), boxed_params(model), RULES, mesh, "data")
    ours = theirs = 0
    for path, shape, _, entries in FACTS["models"][model]["params"]:
        leaf = layouts.opt_state.leaves[0].mu[path]
        assert leaf.spec == layouts.params.specs[path]
        assert math.prod(leaf.shard_shape) <= first_that_fits(shape, spec_of(entries), mesh), path
        ours += math.prod(leaf.shard_shape)
        theirs += first_that_fits(shape, spec_of(entries), mesh)
    assert ours <= theirs
    assert layouts.params.bytes_per_device * DATA == layouts.compute.bytes_per_device


@pytest.mark.parametrize(
    "tx",
    [
        optax.adafactor(1e-3, momentum=0.9),
        CONTRIB.muon(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1, 9))),
        optax.sgd(1e-3, momentum=0.9),
    ],
    ids=["adafactor", "muon", "chain", "sgd"],
)
def test_where_maxtext_finds_no_adam(tx: Any) -> None:
    """Its search for `mu` raises for these, or passes over a part of the state."""
    layouts = shard_optimizer_state(tx, boxed_params("qwen3-0.6b"), RULES, MESH, "data")
    of_params = [leaf for leaf in layouts.opt_state.rows if leaf.bytes > 100]
    assert of_params
    assert [leaf for leaf in of_params if "data" not in str(leaf.spec)] == []


MESH = mesh_of("qwen3-0.6b", DATA)
