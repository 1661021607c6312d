"""Checkpoints of sharded arrays: any mesh to any mesh, each device its own share."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from opt_checkpoint import (
    Checkpointer,
    LeafInfo,
    NamedState,
    Schema,
    _digest,
)
from opt_checkpoint._digest import digests
from opt_core.extend import split_path

P = PartitionSpec
VALUES = {
    "params/w": np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32),
    "params/b": np.random.default_rng(1).standard_normal(24).astype("float32"),
    "state/count": np.int32(7),
}


def mesh(shape: tuple[int, ...], kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    names = ("data", "model")[: len(shape)]
    return jax.sharding.Mesh(devices, names, axis_types=(kind,) * len(shape))


def placed(on: jax.sharding.Mesh, specs: dict[str, P], kind: str | None = None) -> NamedState:
    leaves = {
        name: jax.device_put(value, NamedSharding(on, specs.get(name, P()), memory_kind=kind))
        for name, value in VALUES.items()
    }
    infos = (
        LeafInfo(split_path(name), leaf.shape, str(leaf.dtype), "params")
        for name, leaf in leaves.items()
    )
    return NamedState(leaves, Schema(tuple(infos)))


def wanted(like: NamedState) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in like.items()
    }


ZERO = {"params/w": P("data", "model"), "params/b": P("model")}
TARGETS = [
    ((2, 4), ZERO),
    ((8, 1), ZERO),
    ((1, 8), {"params/w": P("model", "data")}),
    ((4, 1), {"params/w": P(None, "data"), "params/b": P("data")}),
    ((2, 1), ZERO),
    ((2, 2), {"params/w": P(("model", "data"))}),
    ((1, 1), {}),
]


def test_a4_other_meshes(tmp_path: Path) -> None:
    """Saved on 8 devices as 4x2; restored on 2x4, 8x1, 1x8, 4, 2 and 1: digests equal."""
    expected = digests([*VALUES.values()])
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, placed(mesh((4, 2)), ZERO))
        checkpointer.wait()
        saved = checkpointer.at(1)
    for kind in (AxisType.Auto, AxisType.Explicit):
        for shape, specs in TARGETS:
            places = wanted(placed(mesh(shape, kind), specs))
            read = saved.read(places)
            for name, leaf in read.items():
                assert leaf.sharding == places[name].sharding
                np.testing.assert_array_equal(np.asarray(leaf), VALUES[name])
            for backend in ("cpu", "gpu"):  # large arrays, by each way to sum them
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(_digest, "_LARGE", 1)
                    patch.setattr(jax, "default_backend", lambda backend=backend: backend)
                    assert digests([*read.values()]) == expected


def test_a10_pinned_host(tmp_path: Path) -> None:
    """State in `pinned_host`: the memory kind is that of the target, the bits are the same."""
    on = mesh((4, 2))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, placed(on, ZERO, "pinned_host"))
        checkpointer.wait()
        saved = checkpointer.at(1)
        for kind in ("pinned_host", "device"):
            read = saved.read(wanted(placed(on, ZERO, kind)))
            for name, leaf in read.items():
                assert leaf.sharding.memory_kind == kind
                np.testing.assert_array_equal(np.asarray(leaf), VALUES[name])
