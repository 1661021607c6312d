"""Muon on a decoder's matrices: planned for thousands of devices, compiled for hundreds."""

import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import matrix_plans
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from opt_matrix import Matrices, plan_matrices

AXES = {
    "q": ("embed", "heads", "kv"),
    "k": ("embed", "kv_heads", "kv"),
    "v": ("embed", "kv_heads", "kv"),
    "o": ("heads", "kv", "embed"),
    "wi": ("embed", "mlp"),
    "wg": ("embed", "mlp"),
    "wo": ("mlp", "embed"),
    "norm": ("embed",),
}
MESH_AXES = {"embed": "fsdp", "heads": "tp", "kv_heads": "tp", "mlp": "tp", "kv": None}


def decoder(layers: int, sizes: dict[str, int]) -> tuple[Any, Any, Any]:
    """Returns the shapes, logical axes and specs of unrolled layers."""
    names = [f"layer_{n:02}" for n in range(layers)]
    shapes = {
        name: jax.ShapeDtypeStruct([sizes[axis] for axis in axes], "float32")
        for name, axes in AXES.items()
    }
    specs = {
        name: P(*(MESH_AXES[axis] for axis in axes)) if len(axes) > 1 else P()
        for name, axes in AXES.items()
    }
    tables: tuple[Any, ...] = (shapes, AXES, specs)
    shapes_of, axes_of, specs_of = ({n: dict(table) for n in names} for table in tables)
    return shapes_of, axes_of, specs_of


def test_a_decoder_of_70_billion_parameters_is_planned_in_seconds() -> None:
    sizes = {"embed": 8192, "mlp": 28672, "heads": 64, "kv_heads": 8, "kv": 128}
    params, axes, specs = decoder(80, sizes)
    mesh = AbstractMesh((512, 8), ("fsdp", "tp"))
    for split, parts in ((), 1), (("tp",), 8):
        start = time.process_time()
        plan = plan_matrices(params, specs, mesh, Matrices.by_logical_axes(axes), split_axes=split)
        assert time.process_time() - start < 5
        assert sum(len(group.leaves) for group in plan.groups) == 80 * 7
        assert len(plan.rest) == 80
        for group in plan.groups:
            # Fewer matrices than places: no device has more than one, or a part of one.
            assert group.count + group.padding == 4096 // parts
            assert group.flops_per_device == plan.fn.flops(*group.shape, parts=parts)
            assert group.temp_bytes <= 10 * group.shape[0] * group.shape[1] * 4
        assert json.loads(plan.to_json())["groups"]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "mesh"), matrix_plans.CASES)
def test_plans_of_all_defaults_cost_what_whole_matrices_do(name: str, mesh: str) -> None:
    start = time.process_time()
    plan = matrix_plans.plan_of(name, mesh)
    assert time.process_time() - start < 2
    devices = math.prod(plan.mesh_shape.values())
    for group in plan.groups:
        assert group.collectives <= 2
        share = matrix_plans.share_of(plan, group)
        stack = group.stack_size(plan.mesh_shape)
        matrices = stack - group.padding * stack // (group.count + group.padding)
        if matrices >= devices:
            assert group.flops_per_device <= 1.1 * group.ideal_flops * stack / matrices
            assert group.bytes_per_device <= 12 * share
        else:
            assert group.flops_per_device == plan.fn.flops(*group.shape)
            whole = math.prod(group.shape) * np.dtype(group.kind.dtype).itemsize
            assert group.bytes_per_device <= 2 * whole
    assert plan.temp_bytes <= max(plan.min_group_bytes, plan.max_group_bytes)
    # What cannot be met is no more than one matrix needs, with a few copies in float32.
    assert plan.min_group_bytes <= 8 * 4 * max(math.prod(group.shape) for group in plan.groups)


def test_the_table_of_the_docs_is_what_is_planned() -> None:
    page = Path(__file__).parents[1] / "docs/matrix.md"
    assert matrix_plans.table() in page.read_text()
