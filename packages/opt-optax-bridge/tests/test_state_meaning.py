"""Settings that give saved state its meaning do not change in silence; other numbers may."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_core import MultiOptimizer, Optimizer, describe_state, regroup
from opt_core.errors import SurgeryError
from opt_optax_bridge import OptaxWrapper
from opt_optax_bridge._known import KNOWN

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
contrib: Any = optax.contrib
try:
    aggregating: Any = importlib.import_module("optax.experimental").aggregating
except ImportError:  # Optax < 0.2.8
    aggregating = None
pytestmark = pytest.mark.usefixtures("optax_promotion")

PARAMS = {
    "b": jnp.array([0.5, -1.5, 2.0]),
    "w": jnp.array([[0.3, -0.7, 1.1], [-0.2, 0.9, -1.3], [0.5, 0.1, -0.4]]),
}
EVERYTHING = frozenset({"initialise", "drop", "cast", "reshape", "optimizer"})

# By the name of a transformation and of its setting: what takes the setting, and two values of it.
Setting = tuple[Callable[..., Any], Any, Any]
ADAFACTOR = partial(optax.scale_by_factored_rms, min_dim_size_to_factor=2)
SAM = partial(contrib.sam, optax.sgd(0.01), optax.sgd(0.3))
QUINTIC, CUBIC = (3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)

REFUSED: dict[tuple[str, str], Setting] = {
    ("muon", "ns_coeffs"): (partial(contrib.muon, 0.02), QUINTIC, CUBIC),
    ("momo", "lower_bound"): (partial(contrib.momo, 0.5), 0.0, 0.6),
    ("momo_adam", "lower_bound"): (partial(contrib.momo_adam, 0.5), 0.0, 0.6),
    ("cocob", "alpha"): (contrib.cocob, 100.0, 1.0),
    ("schedule_free", "weight_lr_power"): (partial(contrib.schedule_free_sgd, 0.05), 2.0, 0.0),
    ("schedule_free", "b1"): (partial(contrib.schedule_free_sgd, 0.05), 0.9, 0.5),
    ("dadapt_adamw", "betas"): (contrib.dadapt_adamw, (0.9, 0.9), (0.9, 0.999)),
    ("prodigy", "estim_lr0"): (contrib.prodigy, 1e-6, 1e-2),
    ("factored_rms", "step_offset"): (ADAFACTOR, 0, 6),
    ("rms", "bias_correction"): (partial(optax.rmsprop, 0.1), False, True),
    ("stddev", "bias_correction"): (optax.scale_by_stddev, False, True),
    ("reduce_on_plateau", "accumulation_size"): (contrib.reduce_on_plateau, 10, 5),
    ("reduce_on_plateau", "patience"): (contrib.reduce_on_plateau, 10, 5),
}

WINDOWS: dict[tuple[str, str], Setting] = {
    ("multi_steps", "every_k_schedule"): (partial(optax.MultiSteps, optax.sgd(1.0)), 4, 2),
    ("multi_steps", "use_grad_mean"): (partial(optax.MultiSteps, optax.sgd(1.0), 4), True, False),
    ("apply_every", "k"): (optax.apply_every, 4, 2),
    ("sam", "sync_period"): (SAM, 4, 2),
}

INITIAL: dict[tuple[str, str], Setting] = {
    ("rss", "initial_accumulator_value"): (partial(optax.adagrad, 0.1), 0.1, 2.0),
    ("yogi", "initial_accumulator_value"): (optax.scale_by_yogi, 1e-6, 2.0),
    ("rms", "initial_scale"): (partial(optax.rmsprop, 0.1), 0.0, 2.0),
    ("stddev", "initial_scale"): (optax.scale_by_stddev, 0.0, 2.0),
    ("cocob", "eps"): (contrib.cocob, 1e-8, 1.0),
    ("dadapt_adamw", "estim_lr0"): (contrib.dadapt_adamw, 1e-6, 1e-2),
    ("rprop", "learning_rate"): (optax.scale_by_rprop, 0.01, 0.02),
    ("rprop", "max_step_size"): (partial(optax.rprop, 0.1), 50.0, 1e-5),
    ("rprop", "min_step_size"): (partial(optax.rprop, 0.1), 1e-6, 1e-5),
}

if hasattr(contrib, "galore"):
    PROJECTIONS = [contrib.GaLoreDimensionNumbers(*dims) for dims in ((0, 1), (1, 0))]
    REFUSED["galore", "weight_dimension_numbers"] = (partial(contrib.galore, 0.1, 2), *PROJECTIONS)

if aggregating is not None:
    PER_ELEMENT = partial(aggregating.get_per_element_mean_and_sum_sq_diff_grads, 0)
    EMA = "track_per_element_mean_and_variance_with_ema"
    REFUSED[EMA, "ema_decay"] = (getattr(aggregating, EMA), 0.9, 0.5)
    WINDOWS |= {
        ("accumulate_avg_updates", "accumulation_steps"): (
            aggregating.accumulate_avg_updates,
            4,
            2,
        ),
        (PER_ELEMENT.func.__name__, "accumulation_steps"): (PER_ELEMENT, 4, 2),
    }


def makers_of(table: dict[tuple[str, str], Setting], name: str, setting: str) -> list[Any]:
    """The transformation with either value."""
    constructor, *values = table[name, setting]
    return [constructor(**{setting: value}) for value in values]


def begun(optimizer: Optimizer) -> Optimizer:
    """As after one step: its counts are 1."""

    def counted(leaf: Any) -> Any:
        return leaf + 1 if leaf.shape == () and leaf.dtype == jnp.int32 else leaf

    return optimizer.replace(state=jax.tree.map(counted, optimizer.state))


def change(
    table: dict[tuple[str, str], Setting], name: str, setting: str
) -> tuple[Optimizer, OptaxWrapper]:
    """An optimizer in the first of its windows, and the definition with the other value."""
    old, new = map(OptaxWrapper, makers_of(table, name, setting))
    return begun(old.create(PARAMS)), new


@pytest.mark.parametrize(("name", "setting"), REFUSED)
def test_a_setting_that_gives_the_state_its_meaning_does_not_change(
    name: str, setting: str
) -> None:
    optimizer, new = change(REFUSED, name, setting)
    with pytest.raises(SurgeryError, match=f"`{setting}` of `(.*/)?{name}` was"):
        regroup(optimizer, new, allow=EVERYTHING)


@pytest.mark.parametrize(("name", "setting"), WINDOWS)
def test_a_window_changes_when_it_is_complete(name: str, setting: str) -> None:
    optimizer, new = change(WINDOWS, name, setting)
    with pytest.raises(SurgeryError, match="a window is open"):
        regroup(optimizer, new, allow=EVERYTHING)
    complete = optimizer.optimizer_def.create(PARAMS)
    assert regroup(complete, new)[1].is_ok


def test_an_open_window_of_a_group_without_parameters_may_go() -> None:
    steps = OptaxWrapper(optax.MultiSteps(optax.adam(0.1), 4))
    two = MultiOptimizer.from_rules([("b", steps), ("w", steps)], rest=steps)
    moved, plan = regroup(
        begun(two.create(PARAMS)), MultiOptimizer.from_rules([("b", steps)], rest=steps)
    )
    assert plan.is_ok
    assert int(moved.state.param_states["rest"].mini_step) == 1


@pytest.mark.parametrize(("name", "setting"), INITIAL)
def test_a_setting_of_the_initial_state_changes_and_is_reported(name: str, setting: str) -> None:
    optimizer, new = change(INITIAL, name, setting)
    _, plan = regroup(optimizer, new)
    assert any(f"`{setting}` of `{name}` was" in note for note in plan.notes)
    made = [x for x in describe_state(optimizer).transformations if x.name == name]
    assert {x.effect(setting) for x in made} == {"initial"}


@pytest.mark.internals
def test_every_setting_of_the_table_has_a_test() -> None:
    bearing = {(name, setting) for name, known in KNOWN.items() for setting in known.bearing}
    tested = REFUSED.keys() | WINDOWS.keys() | INITIAL.keys()
    if aggregating is not None and hasattr(contrib, "galore"):
        assert bearing == tested
    else:
        assert bearing > tested


MULTIPLIES: dict[str, Callable[[float], Any]] = {
    "scale": optax.scale,
    "schedule": lambda x: optax.scale_by_schedule(optax.constant_schedule(x)),
    "trust_ratio": lambda x: optax.scale_by_trust_ratio(trust_coefficient=x),
    "normalize_by_update_norm": lambda x: optax.normalize_by_update_norm(scale_factor=x),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MULTIPLIES)
def test_a_factor_bears_meaning_before_moments_alone(name: str) -> None:
    """Moments are in units of what came before."""
    factors, moments = [MULTIPLIES[name](x) for x in (64.0, 1.0)], optax.trace(0.9)
    before = [OptaxWrapper(optax.chain(factor, moments)) for factor in factors]
    after = [OptaxWrapper(optax.chain(moments, factor)) for factor in factors]
    assert regroup(after[0].create(PARAMS), after[1])[1].is_ok
    with pytest.raises(SurgeryError, match=f"of `{name}`, which acts before `"):
        regroup(before[0].create(PARAMS), before[1])


# What the refusals are for: going on in silence goes wrong.


def loss(params: Any, t: Any) -> Any:
    """A bowl that shakes a little."""
    shake = 0.1 * jnp.sin(jnp.arange(9.0).reshape(3, 3) * 7.0 + 3.0 * jnp.asarray(t, jnp.float32))
    goal = {name: jnp.flip(x) - 0.5 for name, x in PARAMS.items()}
    goal = {"b": goal["b"] + shake[0], "w": goal["w"] + shake}
    return sum(jnp.sum((params[name] - goal[name]) ** 2) for name in goal)


def go(tx: Any, params: Any, state: Any, start: int, steps: int) -> tuple[Any, Any]:
    """Parameters and state after some steps."""
    update = jax.jit(optax.with_extra_args_support(tx).update)
    for t in range(start, start + steps):
        value, grads = jax.value_and_grad(loss)(params, t)
        updates, state = update(grads, state, params, value=value)
        params = optax.apply_updates(params, updates)
    return params, state


HARMS = [
    ("muon", "ns_coeffs"),
    ("momo", "lower_bound"),
    ("cocob", "alpha"),
    ("schedule_free", "weight_lr_power"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "setting"), HARMS)
def test_going_on_in_silence_goes_wrong(name: str, setting: str) -> None:
    """The next update from the old state, and from a state that always was the new one's."""
    txs = makers_of(REFUSED, name, setting)
    (params, state), (_, own) = (go(tx, PARAMS, tx.init(PARAMS), 0, 3) for tx in txs)
    found, wanted = (go(txs[1], params, x, 3, 1)[0]["w"] for x in (state, own))
    assert np.linalg.norm(found - wanted) > 0.05 * np.linalg.norm(found - params["w"])
