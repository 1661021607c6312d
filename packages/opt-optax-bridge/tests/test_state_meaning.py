"""Which settings bear the meaning of saved state: what going on under another does, measured.

For each change that is refused, going on in silence goes wrong; the numbers are in
`docs/state-meaning.md`. For each number that is admitted it does not.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_core import describe_state, regroup
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
GOAL = jax.tree.map(lambda x: jnp.flip(x) - 0.5, PARAMS)


def loss(params: Any, t: Any) -> Any:
    """A bowl that shakes a little."""
    shake = 0.1 * jnp.sin(jnp.arange(9.0).reshape(3, 3) * 7.0 + 3.0 * jnp.asarray(t, jnp.float32))
    goal = {"b": GOAL["b"] + shake[0], "w": GOAL["w"] + shake}
    return sum(jnp.sum((params[name] - goal[name]) ** 2) for name in goal)


def go(tx: Any, params: Any, state: Any, start: int, steps: int) -> tuple[Any, Any]:
    """Parameters and state after some steps; the value of the loss goes to whoever takes it."""
    params, state, _ = run(tx, params, state, start, steps)
    return params, state


def run(tx: Any, params: Any, state: Any, start: int, steps: int) -> tuple[Any, Any, float]:
    """The mean of the loss besides."""
    has_value = not isinstance(state, getattr(contrib, "SAMState", ()))
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def compiled(params: Any, state: Any) -> Any:
        def step(carry: Any, t: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(carry[0], t)
            extra = {"value": value} if has_value else {}
            updates, state = tx.update(grads, carry[1], carry[0], **extra)
            new = jax.tree.map(lambda s, old: s.astype(old.dtype), state, carry[1])
            return (optax.apply_updates(carry[0], updates), new), value

        return jax.lax.scan(step, (params, state), jnp.arange(start, start + steps))

    (params, state), values = compiled(params, jax.tree.map(jnp.asarray, state))
    return params, state, float(jnp.mean(values))


def trained(tx: Any, steps: int) -> tuple[Any, Any]:
    return go(tx, PARAMS, tx.init(PARAMS), 0, steps)


def vector(tree: Any) -> Any:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def off(found: Any, wanted: Any, start: Any = None) -> float:
    """How far one tree is from another, relative to how far that is from where both began."""
    assert np.isfinite(vector(wanted)).all()
    if not np.isfinite(vector(found)).all():
        return np.inf
    origin = 0.0 if start is None else vector(start)
    distance = np.linalg.norm(vector(found) - vector(wanted))
    return float(distance / np.linalg.norm(vector(wanted) - origin))


def effect(tx: Any, name: str, setting: str) -> str:
    found = describe_state(OptaxWrapper(tx).create(PARAMS))
    effects = {made.effect(setting) for made in found.transformations if made.name == name}
    assert len(effects) == 1
    return effects.pop()


# Refused: going on in silence goes wrong.

HARMS: dict[tuple[str, str], Callable[[], float]] = {}


def harm(name: str, setting: str) -> Callable[[Callable[[], float]], Callable[[], float]]:
    def register(measured: Callable[[], float]) -> Callable[[], float]:
        if name != "galore" or hasattr(contrib, "galore"):  # of Optax 0.2.8
            HARMS[name, setting] = measured
        return measured

    return register


def from_another_state(old: Any, new: Any, saved: int = 20, steps: int = 1) -> float:
    """Updates from the old state, against those from a state that always was the new one's."""
    params, state = trained(old, saved)
    _, own = trained(new, saved)
    going, _ = go(new, params, state, saved, steps)
    wanted, _ = go(new, params, own, saved, steps)
    return off(going, wanted, params)


def ignored(old: Any, new: Any, saved: int = 20) -> float:
    """How far updates are from what the new setting says; they are those of the old one."""
    params, state = trained(old, saved)
    going, _ = go(new, params, state, saved, 1)
    before, _ = go(old, params, state, saved, 1)
    np.testing.assert_array_equal(vector(going), vector(before))
    _, own = trained(new, saved)
    wanted, _ = go(new, params, own, saved, 1)
    return off(going, wanted, before) if off(wanted, params) == 0 else off(wanted, going, params)


HARMS |= {
    ("muon", "ns_coeffs"): lambda: ignored(
        *(contrib.muon(0.02, ns_coeffs=c) for c in ((3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)))
    ),
    ("momo", "lower_bound"): lambda: ignored(
        contrib.momo(0.5), contrib.momo(0.5, lower_bound=0.6), saved=3
    ),
    ("momo_adam", "lower_bound"): lambda: ignored(
        contrib.momo_adam(0.5), contrib.momo_adam(0.5, lower_bound=0.6), saved=3
    ),
    ("cocob", "alpha"): lambda: from_another_state(
        *(contrib.cocob(alpha=alpha) for alpha in (100.0, 1.0))
    ),
    ("schedule_free", "weight_lr_power"): lambda: from_another_state(
        *(contrib.schedule_free_sgd(0.05, weight_lr_power=power) for power in (2.0, 0.0))
    ),
}


@harm("galore", "weight_dimension_numbers")
def _() -> float:
    made = [
        contrib.galore(0.1, rank=2, weight_dimension_numbers=contrib.GaLoreDimensionNumbers(*axes))
        for axes in ((0, 1), (1, 0))
    ]
    return from_another_state(*made)


@harm("schedule_free", "b1")
def _() -> float:
    """Of the parameters for evaluation, which keep the old one."""
    old, new = (contrib.schedule_free_sgd(0.05, b1=b1) for b1 in (0.9, 0.5))
    params, state = trained(old, 20)
    params, state = go(new, params, state, 20, 5)
    right = contrib.schedule_free_eval_params(state._replace(b1=jnp.float32(0.5)), params)
    return off(contrib.schedule_free_eval_params(state, params), right)


@harm("dadapt_adamw", "betas")
def _() -> float:
    """Of the estimated rate, which never comes down again."""
    old, new = (contrib.dadapt_adamw(betas=betas) for betas in ((0.9, 0.9), (0.9, 0.999)))
    params, state = trained(old, 20)
    _, going = go(new, params, state, 20, 20)
    _, before = go(old, params, state, 20, 20)
    _, own = trained(new, 40)
    return float(going.estim_lr / max(before.estim_lr, own.estim_lr)) - 1.0


@harm("prodigy", "estim_lr0")
def _() -> float:
    """Of the estimated rate: what was summed up in other units outweighs what is seen now."""
    old, new = (contrib.prodigy(estim_lr0=rate) for rate in (1e-6, 1e-2))
    params, state = trained(old, 20)
    _, going = go(new, params, state, 20, 40)
    _, before = go(old, params, state, 20, 40)
    _, own = trained(new, 60)
    return 1.0 - float(going.estim_lr / min(before.estim_lr, own.estim_lr))


@harm("factored_rms", "step_offset")
def _() -> float:
    """A power of a number of steps below 0 is none: every parameter is NaN."""
    old, new = (optax.adafactor(0.05, decay_offset=n, min_dim_size_to_factor=2) for n in (0, 6))
    params, state = trained(old, 5)
    found, wanted = (go(tx, params, state, 5, 1)[0] for tx in (new, old))
    return off(found, wanted, params)


MULTIPLIES: dict[str, tuple[str, Callable[[float], Any]]] = {
    "scale": ("step_size", optax.scale),
    "schedule": ("step_size_fn", lambda x: optax.scale_by_schedule(optax.constant_schedule(x))),
    "trust_ratio": (
        "trust_coefficient",
        lambda x: optax.scale_by_trust_ratio(trust_coefficient=x),
    ),
    "normalize_by_update_norm": (
        "scale_factor",
        lambda x: optax.normalize_by_update_norm(scale_factor=x),
    ),
}


def multiplied(name: str, by: float, *, is_after: bool = False) -> Any:
    moments = optax.scale_by_adam() if name == "scale" else optax.trace(0.9)
    factor = MULTIPLIES[name][1](by)
    return optax.chain(*((moments, factor) if is_after else (factor, moments)), optax.scale(-0.01))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MULTIPLIES)
def test_a_factor_bears_meaning_before_moments_alone(name: str) -> None:
    """Moments are in units of what came before."""
    assert from_another_state(multiplied(name, 64.0), multiplied(name, 1.0), steps=20) > 0.05
    before, after = (
        [OptaxWrapper(multiplied(name, by, is_after=is_after)) for by in (64.0, 1.0)]
        for is_after in (False, True)
    )
    assert regroup(after[0].create(PARAMS), after[1])[1].is_ok
    with pytest.raises(SurgeryError, match=f"of `{name}`, which acts before `"):
        regroup(before[0].create(PARAMS), before[1])


def harm_of_a_correction(make: Callable[..., Any]) -> float:
    """The count of steps begins beside moments that are 20 steps old."""
    old, new = (make(0.99, bias_correction=flag) for flag in (False, True))
    params, state = trained(optax.chain(old, optax.scale(-0.01)), 20)
    fresh = new.init(PARAMS)._replace(**state[0]._asdict())
    known = fresh._replace(count=jnp.int32(20))
    chained = optax.chain(new, optax.scale(-0.01))
    going, _ = go(chained, params, (fresh, state[1]), 20, 1)
    wanted, _ = go(chained, params, (known, state[1]), 20, 1)
    return off(going, wanted, params)


for _name, _make in (("rms", optax.scale_by_rms), ("stddev", optax.scale_by_stddev)):
    harm(_name, "bias_correction")(functools.partial(harm_of_a_correction, _make))


def grads_at(t: int) -> Any:
    return jax.tree.map(lambda p: jnp.cos(p * 3.0 + t), PARAMS)


def emitted(tx: Any, state: Any, start: int, most: int = 40) -> tuple[Any, int]:
    """The next update that is not 0, and after how many steps it came."""
    for t in range(start, start + most):
        updates, state = tx.update(grads_at(t), state, PARAMS)
        if np.any(vector(updates)):
            return updates, t - start + 1
    return jax.tree.map(jnp.zeros_like, PARAMS), most


def in_a_window(tx: Any, steps: int) -> Any:
    state = tx.init(PARAMS)
    for t in range(steps):
        _, state = tx.update(grads_at(t), state, PARAMS)
    return state


def mean_of(*steps: int) -> Any:
    return jax.tree.map(lambda *gs: sum(gs) / len(gs), *map(grads_at, steps))


@harm("multi_steps", "every_k_schedule")
def _() -> float:
    """The emission comes steps too late, of a mean that is none of a window."""
    old, new = (optax.MultiSteps(optax.sgd(1.0), k) for k in (4, 2))
    updates, steps = emitted(new, in_a_window(old, 3), 3)
    assert steps > 1
    return off(jax.tree.map(jnp.negative, updates), mean_of(2, 3))


@harm("multi_steps", "use_grad_mean")
def _() -> float:
    old, new = (optax.MultiSteps(optax.sgd(1.0), 4, use_grad_mean=flag) for flag in (True, False))
    updates, _ = emitted(new, in_a_window(old, 2), 2)
    total = jax.tree.map(lambda x: -4.0 * x, mean_of(0, 1, 2, 3))
    return off(updates, total)


@harm("apply_every", "k")
def _() -> float:
    """Two of the gradients are forgotten."""
    state = in_a_window(optax.apply_every(4), 2)
    updates, _ = emitted(optax.apply_every(2), state, 2)
    return off(updates, jax.tree.map(lambda x: 4.0 * x, mean_of(0, 1, 2, 3)))


@harm("sam", "sync_period")
def _() -> float:
    """The parameters never come back from an excursion of three steps."""
    made = [contrib.sam(optax.sgd(0.01), optax.sgd(0.3), sync_period=k) for k in (4, 2)]
    params, state = trained(made[0], 3)
    going, _ = go(made[1], params, state, 3, 1)
    wanted, _ = go(made[0], params, state, 3, 1)
    return off(going, wanted, PARAMS)


@harm("reduce_on_plateau", "accumulation_size")
def _() -> float:
    return never_again({"accumulation_size": 10}, {"accumulation_size": 5}, "count")


@harm("reduce_on_plateau", "patience")
def _() -> float:
    return never_again({"patience": 10}, {"patience": 5}, "plateau_count")


def never_again(old: dict[str, Any], new: dict[str, Any], count: str) -> float:
    """How much larger the scale is after 300 steps without progress than it should be."""
    saved = plateau(old, None, 8)
    assert int(getattr(saved, count)) >= 5
    going, own = plateau(new, saved, 300), plateau(new, None, 300)
    assert float(going.scale) == 1.0
    return float(going.scale / own.scale) - 1.0


def plateau(options: dict[str, Any], state: Any, steps: int) -> Any:
    tx = contrib.reduce_on_plateau(**options)
    state = tx.init(PARAMS) if state is None else state

    def step(state: Any, _: Any) -> Any:
        return tx.update(PARAMS, state, value=jnp.float32(1.0))[1], None

    return jax.lax.scan(step, state, None, steps)[0]


if aggregating is not None:

    @harm("accumulate_avg_updates", "accumulation_steps")
    def _() -> float:
        """Nothing is emitted from then on."""
        old, new = map(aggregating.accumulate_avg_updates, (4, 2))
        updates, _ = emitted(new, in_a_window(old, 3), 3)
        return off(updates, mean_of(2, 3))

    @harm("get_per_element_mean_and_sum_sq_diff_grads", "accumulation_steps")
    def _() -> float:
        made = [
            aggregating.get_per_element_mean_and_sum_sq_diff_grads(0, steps) for steps in (4, 2)
        ]
        state = made[0].init(PARAMS)
        for t in range(40):
            examples = jax.tree.map(lambda g: jnp.stack([g, 3.0 * g]), grads_at(t))
            (updates, _), state = made[t >= 3].update(examples, state)
            if t >= 3:
                assert not np.any(vector(updates))
        return 1.0

    @harm("track_per_element_mean_and_variance_with_ema", "ema_decay")
    def _() -> float:
        """The unbiased mean is found with the old decay."""
        old, new = (aggregating.track_per_element_mean_and_variance_with_ema(d) for d in (0.9, 0.5))
        state, extra = old.init(PARAMS), {"sum_sq_diff_grads": PARAMS, "sample_size": 2}
        for t in range(4):
            _, state = (old if t < 2 else new).update(grads_at(t), state, PARAMS, **extra)
        right = state._replace(ema_decay=jnp.float32(0.5))
        found, wanted = map(aggregating.get_unbiased_mean_and_variance_ema, (state, right))
        return off(found[0], wanted[0])


def builds(name: str, setting: str) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "galore": lambda: contrib.galore(0.1, rank=2),
        "muon": lambda: contrib.muon(0.1),
        "momo": contrib.momo,
        "momo_adam": contrib.momo_adam,
        "cocob": contrib.cocob,
        "schedule_free": lambda: contrib.schedule_free_sgd(),
        "dadapt_adamw": contrib.dadapt_adamw,
        "prodigy": contrib.prodigy,
        "factored_rms": optax.scale_by_factored_rms,
        "rms": optax.scale_by_rms,
        "stddev": optax.scale_by_stddev,
        "multi_steps": lambda: optax.MultiSteps(optax.sgd(1.0), 4),
        "apply_every": lambda: optax.apply_every(4),
        "sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
        "reduce_on_plateau": contrib.reduce_on_plateau,
    }
    if name in made:
        return made[name]()
    if "accumul" in setting:
        return getattr(aggregating, name)(
            accumulation_steps=4, **({} if name.startswith("accum") else {"per_elt_axis": 0})
        )
    return getattr(aggregating, name)()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "setting"), HARMS)
def test_going_on_in_silence_goes_wrong(name: str, setting: str) -> None:
    assert effect(builds(name, setting), name, setting) != "nothing"
    assert HARMS[name, setting]() > 0.05


@pytest.mark.internals
def test_every_refusal_is_measured() -> None:
    refused = {(name, setting) for name, known in KNOWN.items() for setting in known.bearing}
    refused -= INITIAL.keys()
    if aggregating is not None and hasattr(contrib, "galore"):
        assert refused == HARMS.keys()
    else:
        assert refused > HARMS.keys()


INITIAL: dict[tuple[str, str], tuple[str, tuple[float, float]]] = {
    ("rss", "initial_accumulator_value"): ("adagrad", (0.1, 2.0)),
    ("yogi", "initial_accumulator_value"): ("scale_by_yogi", (1e-6, 2.0)),
    ("rms", "initial_scale"): ("rmsprop", (0.0, 2.0)),
    ("stddev", "initial_scale"): ("scale_by_stddev", (0.0, 2.0)),
    ("cocob", "eps"): ("contrib.cocob", (1e-8, 1.0)),
    ("dadapt_adamw", "estim_lr0"): ("contrib.dadapt_adamw", (1e-6, 1e-2)),
    ("rprop", "learning_rate"): ("scale_by_rprop", (0.01, 0.02)),
    ("rprop", "max_step_size"): ("rprop", (50.0, 1e-5)),
    ("rprop", "min_step_size"): ("rprop", (1e-6, 1e-5)),
}


@pytest.mark.parametrize(("name", "setting"), INITIAL)
def test_settings_without_effect_on_saved_state_are_reported(name: str, setting: str) -> None:
    maker, values = INITIAL[name, setting]
    rate = {"learning_rate": 0.1} if maker in ("adagrad", "yogi", "rmsprop", "rprop") else {}
    old, new = (maker_of(maker)(**{**rate, setting: value}) for value in values)
    assert effect(old, name, setting) == effect(new, name, setting) == "initial"


# Admitted: numbers that may change.

CHANGES: dict[str, dict[str, tuple[float, float]]] = {
    "adam": {"b1": (0.9, 0.8), "b2": (0.99, 0.9), "eps": (1e-8, 1e-3)},
    "adabelief": {"b2": (0.99, 0.9)},
    "adan": {"b1": (0.98, 0.9), "b2": (0.92, 0.8), "b3": (0.99, 0.9)},
    "lion": {"b1": (0.9, 0.8), "b2": (0.99, 0.9)},
    "rmsprop": {"decay": (0.9, 0.99)},
    "adagrad": {"eps": (1e-7, 1e-3)},
    "sgd": {"momentum": (0.9, 0.8)},
    "adafactor": {"decay_rate": (0.8, 0.9)},
    "rprop": {"eta_plus": (1.2, 1.1)},
    "contrib.ademamix": {"b1": (0.9, 0.8), "b3": (0.9999, 0.99)},
    "contrib.adopt": {"b2": (0.99, 0.9)},
    "contrib.muon": {"beta": (0.95, 0.9)},
    "contrib.dog": {"eps": (1e-8, 1e-6)},
    "contrib.momo": {"beta": (0.9, 0.8)},
    "contrib.prodigy": {"estim_lr_coef": (1.0, 0.9)},
    "contrib.schedule_free_sgd": {"learning_rate": (0.05, 0.04)},
    "contrib.reduce_on_plateau": {"factor": (0.1, 0.5), "rtol": (1e-4, 1e-2)},
}

RATES = {
    **dict.fromkeys(("lion", "sgd", "rprop"), 0.01),
    "contrib.muon": 0.02,
    **dict.fromkeys(("dog", "momo", "prodigy", "schedule_free_sgd", "reduce_on_plateau")),
}


def maker_of(name: str) -> Any:
    """Optax's constructor; `None` where this Optax does not have it yet."""
    module = contrib if name.startswith("contrib.") else optax
    return getattr(module, name.removeprefix("contrib."), None)


NUMBERS = [
    (maker, name) for maker, changes in CHANGES.items() for name in changes if maker_of(maker)
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("maker", "name"), NUMBERS)
def test_a_number_may_change(maker: str, name: str) -> None:
    """No worse than the worse of the two that kept their number."""
    old, new = (built(maker, **{name: value}) for value in CHANGES[maker][name])
    started, own = trained(old, 40), trained(new, 40)
    *_, going = run(new, *started, 40, 40)
    *_, before = run(old, *started, 40, 40)
    *_, always = run(new, *own, 40, 40)
    assert going < 1.1 * max(before, always) + 0.02


def built(maker: str, **options: float) -> Any:
    rate = RATES.get(maker, RATES.get(maker.removeprefix("contrib."), 0.05))
    if rate is not None:
        options = {"learning_rate": rate, **options}
    tx = maker_of(maker)(**options)
    if maker == "contrib.reduce_on_plateau":
        tx = optax.chain(optax.adam(0.05), tx)
    return optax.with_extra_args_support(tx)
