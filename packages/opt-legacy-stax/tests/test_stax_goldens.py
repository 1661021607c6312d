"""Every recorded trajectory, schedule, norm and error of the real library."""

from typing import Any

import chex
import golden_stax as golden
import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import pytest
from jax.example_libraries import optimizers as theirs

# Op by op; jax 0.10.2 and the jax of the recordings agree bit for bit but for Adam's powers.
EXACT = 2e-7
# With the correction's power computed as when compiled.
POWER = 5e-6

# What is otherwise by default: dtypes are kept, bfloat16 is corrected in float32.
PROMOTED = {
    *("adam_mixed_dtype", "adagrad_mixed_dtype", "momentum_mixed_dtype", "sm3_mixed_dtype"),
    "adam_piecewise_bf16_promotes",
}
CORRECTED = {"adam_bf16", "adam_clip_bf16", "adam_jax0_2_6_bf16"}
STUCK = "adam_bf16_default_b2_quirk"
TRAJECTORIES = golden.cases("trajectory")


def names(found: list[Any]) -> list[str]:
    return [case["id"] for case in found]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", TRAJECTORIES, ids=names(TRAJECTORIES))
def test_exact_numerics_replay(case: Any) -> None:
    is_compiled = case["mode"] == "jit"
    states = golden.replay(case, upstream_numerics=True)
    for t, state in enumerate(states):
        expected = golden.expected_leaves(case, t)
        assert [len(leaves) for leaves in state.packed_state] == list(map(len, expected))
        for found, leaves in zip(state.packed_state, expected, strict=True):
            # Compiled, the processor decides whether products are rounded before they are added.
            assert is_compiled or max(map(golden.worst, found, leaves)) <= EXACT
        check_dtypes(case, t, state)
    if is_compiled:  # for bits, the recordings' module with the compiler of today
        chex.assert_trees_all_equal(*map(jax.tree.leaves, (states, golden.replay(case, theirs))))


def check_dtypes(case: Any, t: int, state: ours.OptimizerState) -> None:
    paths = golden.index()["problems"][case["problem"]]["leaf_paths"]
    for path, leaves in zip(paths, state.packed_state, strict=True):
        for j, leaf in enumerate(leaves):
            mixed = case.get("mixed_dtype", {}).get(f"state/{path}/{j}")
            if mixed is not None:
                assert leaf.dtype.name == mixed["dtypes"][t]


UNCHANGED = [c for c in TRAJECTORIES if c["id"] not in PROMOTED | CORRECTED | {STUCK}]
# Where the default takes another way, and one where it does not.
SHORT = [c for c in UNCHANGED if c["optimizer"] in ("adam", "adamax") or c["id"] == "sm3_bare"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", SHORT, ids=names(SHORT))
def test_the_default_replays_too(case: Any) -> None:
    for t, state in enumerate(golden.replay(case)):
        for found, leaves in zip(state.packed_state, golden.expected_leaves(case, t), strict=True):
            assert max(map(golden.worst, found, leaves)) <= POWER


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sorted(PROMOTED | CORRECTED))
def test_the_default_keeps_dtypes_and_stays_near(name: str) -> None:
    case = golden.case_of(name)
    first, *states = golden.replay(case)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(first) if isinstance(leaf, jax.Array)]
    for t, state in enumerate(states, start=1):
        found = [leaf.dtype for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        assert found == dtypes
        for leaves, recorded in zip(
            state.packed_state, golden.expected_leaves(case, t), strict=True
        ):
            # Three units of bfloat16's last place, after a dozen roundings.
            assert max(map(golden.worst, leaves, recorded)) <= 2.4e-2


SCHEDULES = golden.cases("schedule")


def half_later(i: int) -> float:
    return i + 0.5


@pytest.mark.parametrize("case", SCHEDULES, ids=names(SCHEDULES))
def test_schedules(case: Any) -> None:
    spec, series = case["schedule"], golden.arrays(case["file"])
    schedule = golden.keywords({"s": spec})["s"]
    kinds: list[tuple[str, Any]] = [
        ("python_int", int),
        ("jnp_int32", jnp.int32),
        ("python_float", half_later),
    ]
    for kind, convert in kinds:
        found = [schedule(convert(int(i))) for i in series["steps"]]
        is_python = case["result_dtype"][kind] == "python_float"
        assert all(isinstance(value, float) == is_python for value in found)
        np.testing.assert_allclose(
            np.array(found, np.float64), series[f"values/{kind}"], rtol=3e-7, atol=0
        )


CLIPPED = golden.cases("l2_norm_clip_grads")


@pytest.mark.sample(3)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("case", CLIPPED, ids=names(CLIPPED))
def test_norms(case: Any, exact: bool) -> None:
    series = golden.arrays(case["file"])
    tree = golden.tree(case["structure"], lambda path: jnp.asarray(series[f"tree/{path}"]))
    # The order of a sum depends on the machine: a unit of the last place.
    np.testing.assert_allclose(ours.l2_norm(tree), series["l2_norm"], rtol=2.4e-7)
    for max_norm in case["max_norms"]:
        clipped = ours.clip_grads(tree, max_norm, upstream_numerics=exact)
        by_path = {p.removeprefix(f"clip/{max_norm}/"): leaf for p, leaf in series.items()}
        expected = golden.tree(case["structure"], by_path.__getitem__)
        for found, recorded, g in zip(
            *map(jax.tree.leaves, (clipped, expected, tree)), strict=True
        ):
            assert found.dtype == (recorded if exact else g).dtype
            rtol = 8e-3 if not exact and g.dtype == jnp.bfloat16 else 3e-7
            # Zeros that are clipped to nothing are NaN upstream.
            wanted = recorded if exact else np.where(np.isnan(recorded), 0, recorded)
            np.testing.assert_allclose(
                np.asarray(found, np.complex64), np.asarray(wanted, np.complex64), rtol=rtol
            )
