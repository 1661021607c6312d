"""Against T5X's own Adafactor: trajectories, state dicts, checkpoints, logical axes, errors."""

import functools
from typing import Any

import adafactor_goldens as g
import jax.numpy as jnp
import numpy as np
import opt_adafactor as t5x  # as T5X code may write
import pytest
from adafactor_testing import apply_compiled, rule
from jax.sharding import PartitionSpec as P
from opt_core import Optimizer

# Those of the collection: op by op, and compiled. bfloat16 has 8 bits.
OP_BY_OP = {"rtol": 0.0, "atol": 1e-6}
BFLOAT16 = {"rtol": 1e-2, "atol": 1e-2}


def step(optimizer: Optimizer, case: g.Case, t: int) -> Optimizer:
    return optimizer.apply_gradient(case.grads[t], **case.overrides(t))


@functools.cache
def replay(name: str) -> list[Optimizer]:
    case = g.load(name)
    run = [case.create()]
    for t in range(len(case.grads)):
        run.append(step(run[-1], case, t))
    return run


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", g.case_ids())
def test_trajectories_op_by_op(name: str) -> None:
    case = g.load(name)
    tolerance = BFLOAT16 if "bf16" in name else OP_BY_OP
    for t, optimizer in enumerate(replay(name)):
        found = g.flatten(optimizer.state_dict())
        assert not g.deviations(found, case.entry(t), **tolerance), f"after {t} steps"


SPEC_OPTIONS = {"max_parameter_scale": 0.05, "clipping_threshold": None}


# Three steps on 0.1 sin(0.3 i + 0.7) with gradients sin(0.11 (t + 1) i + 0.5 t): first, last
# and sum of the parameter, first and last of `v_row` or `v`, first of `v_col`. From T5X of 2026.
@pytest.mark.parametrize(
    ("shape", "letters", "options", "numbers"),
    [
        ((6, 9), None, {}, [0.05017419, -0.0662047, 0.4394789, 0.5065811, 0.6004837, 0.42791]),
        ((7,), None, {}, [0.04732634, 0.04271193, 0.4306715, 0.3712187, 0.4197393]),
        (
            (4, 3, 6),
            "rbc",
            {},
            [0.05140093, 0.002939008, 0.4395153, 0.5495402, 0.5711286, 0.3754921],
        ),
        (
            (6, 9),
            None,
            {"weight_decay_rate_lr_exponent": 2, **SPEC_OPTIONS},
            [0.05256078, -0.06740835, 0.4301966, 0.5065811, 0.6004837, 0.42791],
        ),
        ((5, 3), "nb", {}, [0.04643507, -0.09476987, -0.01522185, 0.3712187, 0.466564]),
    ],
)
def test_numbers_of_todays_t5x(shape: Any, letters: Any, options: Any, numbers: Any) -> None:
    if letters is not None:
        options = {**options, "factor_map": t5x.HParamMap([("w", rule(letters))])}
    i = np.arange(np.prod(shape))
    optimizer = t5x.Adafactor(0.1, min_dim_size_to_factor=2, **options).create(
        {"w": jnp.float32(0.1 * np.sin(0.3 * i + 0.7)).reshape(shape)}
    )
    for t in range(3):
        grad = np.sin(0.11 * (t + 1) * i + 0.5 * t).reshape(shape)
        optimizer = apply_compiled(optimizer, {"w": jnp.float32(grad)})
    p, state = np.ravel(optimizer.target["w"]), optimizer.state.param_states["w"]
    v = np.ravel(state.v_row if len(numbers) == 6 else state.v)
    found = [p[0], p[-1], p.sum(), v[0], v[-1], np.ravel(state.v_col)[0]][: len(numbers)]
    np.testing.assert_allclose(found, numbers, rtol=1e-5, atol=1e-7)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", g.case_ids("checkpoint"))
def test_checkpoints_restore_exactly(name: str) -> None:
    case = g.load(name)
    restored = case.create().restore_state(case.checkpoint)
    last = case.entry(len(case.grads))
    assert not g.deviations(g.flatten(restored.state_dict()), last, rtol=0.0, atol=0.0)


def test_errors_are_of_the_types_that_t5x_raises() -> None:
    standard = t5x.standard_logical_factor_rules()
    cube = {"a": jnp.ones((24, 4, 16))}
    matrix_rule = t5x.HParamMap([("a", (t5x.FactorDim.ROW, t5x.FactorDim.COLUMN))])
    calls: list[Any] = [
        lambda: t5x.Adafactor(factored=False, factor_map=t5x.HParamMap([])),
        lambda: t5x.Adafactor(multiply_by_parameter_scale="yes"),  # type: ignore[arg-type]
        lambda: t5x.Adafactor(factor_map={"a": None}),  # type: ignore[arg-type]
        lambda: t5x.Adafactor(0.1).create(cube),
        lambda: t5x.Adafactor(0.1, factor_map=matrix_rule).create(cube),
        lambda: t5x.HParamMap([("b", None)])["a"],
        lambda: t5x.Adafactor(logical_factor_rules=standard).set_param_axes(
            {"a": P("embed", "relpos_buckets", "mlp")}
        ),
        lambda: t5x.Adafactor(logical_factor_rules=standard).set_param_axes(
            {"a": P("embed", "unknown")}
        ),
        lambda: t5x.factor_name_to_factordim("diag"),
    ]
    recorded = g.index()["errors"][: len(calls)]
    builtins = {"ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError}
    for call, record in zip(calls, recorded, strict=True):
        with pytest.raises(builtins[record["error"]["type"]], match=r"`"):
            call()
