"""Muon on a decoder's matrices: planned for thousands of devices, compiled for hundreds."""

import math
import time
from pathlib import Path

import matrix_plans
import numpy as np
import pytest


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
    page = Path(__file__).parents[1] / "docs/performance.md"
    assert matrix_plans.table() in page.read_text()
