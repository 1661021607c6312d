"""Surgery on real Optax optimizers: what goes on, what does not, and what it does to training."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_adafactor
import opt_optax_bridge as opt
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_checkpoint import named_state, plan_restore
from opt_core import (
    FROZEN,
    ChangeReport,
    MultiOptimizer,
    Optimizer,
    OptimizerDef,
    describe_state,
    freeze,
    regroup,
    reset,
    unfreeze,
)
from opt_core.errors import GroupError, SurgeryError

contrib: Any = optax.contrib  # it exports nothing explicitly
unlisted: Any = optax  # what Optax exports without listing it
EVERYTHING = frozenset({"initialise", "drop", "cast", "reshape", "regroup", "optimizer"})
MINE = __name__.partition(".")[0]  # the package of what these tests define


def make_params() -> Any:
    return {"w": jnp.arange(64.0).reshape(8, 8) / 64, "b": jnp.ones(8)}


def gradients(step: int) -> Any:
    return jax.tree.map(lambda p: jnp.cos(p * 7 + step), make_params())


def trained(definition: OptimizerDef, steps: int = 3) -> Optimizer:
    return advanced(definition.create(make_params()), steps)


def advanced(optimizer: Optimizer, steps: int) -> Optimizer:
    update = jax.jit(lambda o, g: o.apply_gradient(g))
    for _ in range(steps):
        optimizer = update(optimizer, gradients(int(optimizer.state.step)))
    return optimizer


def wrapped(tx: Any) -> OptimizerDef:
    return opt.OptaxWrapper(tx)


def multi_steps(tx: Any, every_k: int) -> OptimizerDef:
    return wrapped(optax.MultiSteps(tx, every_k).gradient_transformation())


def schedule(value: float = 0.1) -> optax.Schedule:
    return optax.linear_schedule(value, 0.0, 100)


def counts(optimizer: Optimizer, role: str) -> list[int]:
    described = describe_state(optimizer).leaves
    leaves = jax.tree.leaves(optimizer.state.param_states)
    return [int(x) for x, leaf in zip(leaves, described, strict=True) if leaf.role == role]


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


# Every pair of optimizers.


def _plain_twins() -> dict[str, OptimizerDef]:
    """The wrapped optimizers of Optax that are built of a learning rate alone."""
    found: dict[str, OptimizerDef] = {}
    for name in opt.optimizer_names():
        if name not in vars(optax) or name == "optimistic_adam":  # the latter is deprecated
            continue
        constructor = getattr(opt, name)
        needed = [
            p.name
            for p in inspect.signature(constructor).parameters.values()
            if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        if needed == ["learning_rate"]:
            # Optax asks for a key of its random numbers, and takes a seed.
            extra = {"key": 0} if "key" in inspect.signature(constructor).parameters else {}
            found[name] = constructor(0.01, **extra)
    return found


DEFINITIONS: dict[str, OptimizerDef] = {
    **_plain_twins(),
    "sgd_momentum": opt.sgd(0.01, momentum=0.9),
    "adam_of_schedule": opt.adam(schedule()),
    "clipped_adamw": wrapped(optax.chain(optax.clip(1.0), optax.adamw(0.01))),
    "multi_steps_adamw": multi_steps(optax.adamw(0.01), 3),
    "injected_adamw": wrapped(optax.inject_hyperparams(optax.adamw)(learning_rate=0.01)),
    "two_ema": wrapped(optax.chain(optax.ema(0.5), optax.ema(0.9))),
    "factored": opt.adafactor(0.01, min_dim_size_to_factor=4),
    "t5x_adafactor": opt_adafactor.Adafactor(0.01, min_dim_size_to_factor=4),
    "groups": MultiOptimizer.from_rules([("w", "w", opt.adam(0.01))], rest=opt.sgd(0.01)),
}

REFUSED: set[tuple[str, str]] = set()


def test_the_table_has_the_common_optimizers() -> None:
    common = {"adam", "adamw", "adamax", "yogi", "adabelief", "nadam", "amsgrad", "sgd", "rmsprop"}
    assert common <= DEFINITIONS.keys()
    assert len(DEFINITIONS) > 25


def _check_keys(optimizer: Optimizer, found: Optimizer, report: ChangeReport) -> None:
    """What is kept has the key of what it was, and is it."""
    before = {
        "/".join(leaf.path): (leaf.key, value)
        for leaf, value in zip(
            describe_state(optimizer).leaves,
            jax.tree.leaves(optimizer.state.param_states),
            strict=True,
        )
    }
    leaves = jax.tree.leaves(found.state.param_states)
    described = describe_state(found).leaves
    changes = [change for change in report.changes if change.action != "dropped"]
    for leaf, value, change in zip(described, leaves, changes, strict=True):
        assert change.path == "/".join(leaf.path)
        if change.action == "kept":
            assert all(before[source][0] == leaf.key for source in change.sources), change
            assert value is before[change.sources[0]][1]
        else:
            assert leaf.key not in {key for key, _ in before.values()}, change
    taken = {source for change in changes for source in change.sources}
    assert set(report.dropped) == before.keys() - taken


@pytest.mark.sample(20)
@pytest.mark.parametrize("source", DEFINITIONS)
def test_no_pair_keeps_what_is_another_thing(source: str) -> None:
    """On shapes: nothing is compiled for 1,300 pairs."""
    params = jax.eval_shape(make_params)
    optimizer = DEFINITIONS[source].create(params)
    for target, definition in DEFINITIONS.items():
        if "groups" in (source, target):
            continue  # two counts may be one, or one two
        found, report = regroup(optimizer, definition, allow=EVERYTHING)
        _check_keys(optimizer, found, report)
        assert jax.tree.map(jnp.shape, found.state) == jax.tree.map(
            jnp.shape, definition.create(params).state
        )


@pytest.mark.parametrize(
    ("source", "target"), [*itertools.permutations(["adam", "adamax", "yogi", "adabelief"], 2)]
)
def test_lookalikes_are_not_mixed(source: str, target: str) -> None:
    optimizer = trained(DEFINITIONS[source])
    with pytest.raises(SurgeryError, match=r"trained state would be dropped:\n.*`0/mu/b`"):
        regroup(optimizer, DEFINITIONS[target])
    found, report = regroup(optimizer, DEFINITIONS[target], allow=EVERYTHING)
    assert report.kept == report.renamed == report.converted == ()
    fresh = DEFINITIONS[target].create(make_params())
    assert_same(found.state.param_states, fresh.state.param_states)


# What goes on.


@pytest.mark.parametrize(
    ("definition", "kept"),
    [
        (wrapped(optax.chain(optax.clip(1e9), optax.adamw(0.01))), 5),
        (multi_steps(optax.adamw(0.01), 2), 5),
        (wrapped(optax.inject_hyperparams(optax.adamw)(learning_rate=0.01)), 5),
        (opt.adam(0.2), 5),
        (MultiOptimizer.from_rules([("w", "w", opt.adamw(0.01))], rest=opt.adamw(0.01)), 6),
        (wrapped(optax.partition({"a": optax.adamw(0.01)}, {"w": "a", "b": "a"})), 5),
    ],
    ids=["chain", "multi_steps", "inject", "adam", "groups", "partition"],
)
def test_every_leaf_of_adamw_continues_and_returns(definition: OptimizerDef, kept: int) -> None:
    optimizer = trained(opt.adamw(0.01))
    there, report = regroup(optimizer, definition)
    assert len(report.kept) == kept
    assert report.dropped == report.renamed == report.converted == ()
    back, report = regroup(there, opt.adamw(0.01))
    assert len(report.kept) == 5
    assert_same(back.state, optimizer.state)
    advanced(there, 1)


def test_training_continues_bit_for_bit() -> None:
    optimizer = trained(opt.adamw(0.01), 4)
    found, _ = regroup(optimizer, wrapped(optax.chain(optax.clip(1e9), optax.adamw(0.01))))
    for step in range(5):  # not compiled: fusions of two programs round differently
        optimizer, found = (o.apply_gradient(gradients(step)) for o in (optimizer, found))
        assert_same(found.target, optimizer.target)


def test_momentum_continues_in_a_chain() -> None:
    optimizer = trained(opt.sgd(0.01, momentum=0.9))
    new = wrapped(optax.chain(optax.clip(1e9), optax.sgd(0.01, momentum=0.9)))
    found, report = regroup(optimizer, new)
    assert (len(report.kept), report.initialised, report.dropped) == (2, (), ())
    assert_same(advanced(found, 3).target, advanced(optimizer, 3).target)


def test_another_dtype_is_cast() -> None:
    optimizer = trained(opt.adam(0.01))
    found, report = regroup(optimizer, opt.adam(0.01, mu_dtype=jnp.bfloat16))
    assert report.converted == ("0/mu/b", "0/mu/w")
    mu = found.state.param_states[0].mu["w"]
    assert mu.dtype == jnp.bfloat16
    assert_same(mu, optimizer.state.param_states[0].mu["w"].astype(jnp.bfloat16))


def test_two_of_a_kind_are_distinguished_by_their_settings() -> None:
    optimizer = trained(wrapped(optax.chain(optax.ema(0.5), optax.ema(0.9))))
    found, report = regroup(
        optimizer, wrapped(optax.chain(optax.ema(0.9))), allow={"drop", "optimizer"}
    )
    assert report.renamed == ("0/count", "0/ema/b", "0/ema/w")
    assert_same(found.state.param_states[0].ema, optimizer.state.param_states[1].ema)


# What is refused.


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (opt.adam(0.1), opt.nadam(0.1), "`nesterov` of `adam` was False, is True"),
        (
            opt.sgd(0.1, momentum=0.9),
            wrapped(optax.chain(optax.scale(-0.1), optax.trace(0.9))),
            "`scale` acted after `trace`, and acts before it",
        ),
        (opt.sgd(schedule(), momentum=0.9), opt.lars(0.1), "`trace` was not the last to act"),
        (
            opt.sgd(0.1, momentum=0.9),
            wrapped(optax.chain(optax.scale_by_rms(), optax.trace(0.9), optax.scale(-0.1))),
            "`rms`, which acts before `trace`, is new",
        ),
    ],
)
def test_what_acts_differently_has_to_be_admitted(
    source: OptimizerDef, target: OptimizerDef, words: str
) -> None:
    optimizer = trained(source)
    with pytest.raises(SurgeryError, match=re.escape(words)):
        regroup(optimizer, target, allow=EVERYTHING - {"optimizer"})
    _, report = regroup(optimizer, target, allow={"optimizer"})
    assert report.kept


def _momentum(*before: Any) -> OptimizerDef:
    return wrapped(optax.chain(*before, optax.trace(0.9), optax.scale(-0.01)))


@pytest.mark.parametrize(
    ("before", "name"),
    [
        (optax.scale_by_trust_ratio(), "trust_ratio"),
        (optax.scale_by_sign(), "sign"),
        (unlisted.normalize_by_update_norm(), "normalize_by_update_norm"),
        (optax.add_decayed_weights(0.5), "add_decayed_weights"),
        (optax.scale_by_schedule(schedule()), "schedule"),
        (optax.scale(0.5), "scale"),
    ],
)
def test_what_rescales_or_adds_before_moments(before: Any, name: str) -> None:
    """Moments are of what they were given: without it, or with it, they are others."""
    plain, other = opt.adam(0.01), wrapped(optax.chain(before, optax.adam(0.01)))
    pairs = [(other, plain, "gone"), (plain, other, "new")]
    pairs += [(_momentum(before), _momentum(), "gone"), (_momentum(), _momentum(before), "new")]
    for source, target, word in pairs:
        optimizer = trained(source)
        words = rf"`{name}`, which acts before `\w+`, is {word}"
        if name == "scale":  # there is one at the end besides, which takes its name
            was, now = ("before", "after") if word == "gone" else ("after", "before")
            words = rf"`scale` acted {was} `\w+`, and acts {now} it"
        with pytest.raises(SurgeryError, match=words):
            regroup(optimizer, target)
        assert regroup(optimizer, target, allow={"optimizer"})[1].kept


def test_another_factor_before_moments_is_refused() -> None:
    """A loss scale that changes: moments would be in other units, for a hundred steps."""

    def scaled(by: float, rate: float = 0.1) -> OptimizerDef:
        return wrapped(optax.chain(optax.scale(by), optax.adam(rate)))

    optimizer = trained(scaled(1024.0))
    with pytest.raises(SurgeryError, match=r"`step_size` of `scale` was 1024\.0, is 1\.0"):
        regroup(optimizer, scaled(1.0), allow=EVERYTHING)
    assert not regroup(optimizer, scaled(1024.0, rate=0.2))[1].initialised


@pytest.mark.parametrize("before", [optax.clip(1.0), optax.identity(), optax.zero_nans()])
def test_what_passes_updates_on_comes_and_goes(before: Any) -> None:
    there, _ = regroup(trained(_momentum()), _momentum(before))
    back, report = regroup(there, _momentum())
    assert len(report.kept) == 2
    assert back.optimizer_def == _momentum()


def doubled(factor: float) -> Any:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda leaf: factor * leaf, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            doubled(2.0),
            doubled(3.0),
            f"`factor` of `{MINE}.doubled`, which acts before `trace`, was 2.0",
        ),
        (optax.identity(), doubled(3.0), f"`{MINE}.doubled`, which acts before `trace`, is new"),
        (
            optax.stateless(lambda g, p: jax.tree.map(lambda leaf: 2 * leaf, g)),
            optax.stateless(lambda g, p: jax.tree.map(lambda leaf: 3 * leaf, g)),
            "`f` of `stateless`, which acts before `trace`, was <lambda>",
        ),
    ],
)
def test_what_a_users_function_does_before_moments(before: Any, after: Any, message: str) -> None:
    """Carried over in silence, momentum would be wrong by a third, or by two."""
    ones, others = (wrapped(optax.chain(tx, optax.trace(0.9))) for tx in (before, after))
    with pytest.raises(SurgeryError, match=message):
        regroup(trained(ones), others)
    plan = plan_restore(named_state(trained(ones)), others.create(make_params()))
    assert plan.missing_kinds == {"optimizer"}
    last = (wrapped(optax.chain(optax.trace(0.9), tx)) for tx in (doubled(2.0), doubled(3.0)))
    assert not regroup(trained(next(last)), next(last))[1].dropped


def labels_of(names: tuple[str, ...]) -> Any:
    return lambda tree: {name: "x" if name in names else "y" for name in tree}


def mask_of(names: tuple[str, ...]) -> Any:
    return lambda tree: {name: name in names for name in tree}


def partly(tx: Any, *names: str, how: str) -> Any:
    """A transformation of some parameters; built again, it is the same."""
    match how:
        case "mask":
            return optax.masked(tx, mask_of(names)(make_params()))
        case "callable mask":
            return optax.masked(tx, mask_of(names))
        case "labels":
            labels = labels_of(names)(make_params())
        case _:
            labels = labels_of(names)
    return optax.partition({"x": tx, "y": optax.identity()}, labels)


def doubling(name: str) -> Any:
    match name:
        case "scale":
            return optax.scale(2.0)
        case "schedule":
            return optax.scale_by_schedule(optax.constant_schedule(2.0))
        case _:
            return optax.stateless(lambda g, p: jax.tree.map(lambda leaf: 2 * leaf, g))


HOW = ["mask", "callable mask", "labels", "callable labels"]


@pytest.mark.sample(6)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["scale", "schedule", "stateless"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_what_acts_before_moments_on_other_parameters(how: str, name: str, is_flat: bool) -> None:
    """Carried over in silence, momentum would be twice of what it should be, or half."""
    momentum: Any = optax.flatten(optax.trace(0.9)) if is_flat else optax.trace(0.9)

    def made(*names: str) -> OptimizerDef:
        return wrapped(optax.chain(partly(doubling(name), *names, how=how), momentum))

    optimizer = trained(made("b"), 1)
    message = (
        f"`{name}`, which acts before `trace`, acts on other parameters: 1 gone (`b`), 1 new (`w`)"
    )
    with pytest.raises(SurgeryError, match=re.escape(message)):
        regroup(optimizer, made("w"))
    assert not regroup(optimizer, made("w"), allow={"optimizer"})[1].dropped
    assert not regroup(optimizer, made("b"))[1].dropped
    saved = named_state(optimizer)
    assert plan_restore(saved, made("b").create(make_params())).is_exact
    plan = plan_restore(saved, made("w").create(make_params()))
    assert plan.changes == (message,)
    assert plan.missing_kinds == {"optimizer"}
    wider = plan_restore(saved, made("w", "b").create(make_params()))
    assert wider.changes == (message.replace("1 gone (`b`), ", ""),)


def test_a_mask_that_hides_nothing_is_the_same_as_none() -> None:
    ones, others = (
        wrapped(optax.chain(tx, optax.trace(0.9)))
        for tx in (optax.scale(2.0), partly(optax.scale(2.0), "w", "b", how="mask"))
    )
    saved = named_state(trained(ones, 1))
    assert plan_restore(saved, others.create(make_params())).is_exact


@pytest.mark.parametrize("how", HOW)
def test_what_follows_moments_or_passes_on_may_act_on_others(how: str) -> None:
    for parts in (
        lambda *names: (optax.trace(0.9), partly(optax.scale(2.0), *names, how=how)),
        lambda *names: (partly(optax.clip(1.0), *names, how=how), optax.trace(0.9)),
    ):
        one, other = (wrapped(optax.chain(*parts(name))) for name in "wb")
        optimizer = trained(one, 1)
        assert plan_restore(named_state(optimizer), other.create(make_params())).is_exact
        assert not regroup(optimizer, other)[1].dropped


@pytest.mark.parametrize("how", HOW)
def test_a_factor_in_a_part_of_the_parameters_is_a_factor(how: str) -> None:
    def made(factor: float) -> OptimizerDef:
        return wrapped(optax.chain(partly(optax.scale(factor), "b", how=how), optax.trace(0.9)))

    optimizer = trained(made(2.0), 1)
    with pytest.raises(SurgeryError, match=r"`step_size` of `scale` was 2\.0, is 3\.0"):
        regroup(optimizer, made(3.0), allow=EVERYTHING)
    assert plan_restore(named_state(optimizer), made(3.0).create(make_params())).problems


@pytest.mark.parametrize("how", HOW)
def test_a_vector_of_other_parameters_does_not_continue(how: str) -> None:
    """Vectors of one size: the momentum of one parameter would be that of the other."""
    params = {"w": jnp.ones(8), "b": jnp.ones(8)}
    one, again, other = (
        wrapped(partly(optax.flatten(optax.trace(0.9)), name, how=how)) for name in "wwb"
    )
    optimizer = one.create(params).apply_gradient(params)
    assert plan_restore(named_state(optimizer), again.create(params)).is_exact
    assert not regroup(optimizer, again)[1].dropped
    plan = plan_restore(named_state(optimizer), other.create(params))
    assert plan.missing_kinds == {"initialise", "drop"}
    with pytest.raises(SurgeryError, match="it concatenates parameters"):
        regroup(optimizer, other)


@dataclasses.dataclass(frozen=True)
class Config:
    decay: float = 0.9
    kind: str = "mean"
    is_mean: bool = True
    dtype: str = "float32"


class Averages(NamedTuple):
    average: Any


def averages(config: Any) -> Any:
    """A user's transformation whose state is a mean, or a sum."""
    kind = config if isinstance(config, str) else config.kind
    new = 0.1 if kind == "mean" else 1.0

    def init(params: Any) -> Averages:
        return Averages(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        assert config, params
        average = jax.tree.map(lambda a, g: 0.9 * a + new * g, state.average, updates)
        return average, Averages(average)

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mean", "sum", f"`config` of `{MINE}.averages` was mean, is sum"),
        (Config(), Config(kind="sum"), f"`config.kind` of `{MINE}.averages` was mean, is sum"),
        (
            Config(),
            Config(is_mean=False),
            f"`config.is_mean` of `{MINE}.averages` was True, is False",
        ),
    ],
    ids=str,
)
def test_a_word_that_a_user_s_function_has_captured(old: Any, new: Any, message: str) -> None:
    optimizer, other = trained(wrapped(averages(old)), 20), wrapped(averages(new))
    going, own = optimizer.state.param_states.average, trained(other, 20)
    if new != old and not isinstance(new, Config):  # carried over, a tenth of what it should be
        ratio = own.state.param_states.average["w"] / going["w"]
        np.testing.assert_allclose(ratio, 10.0, rtol=1e-3)
    with pytest.raises(SurgeryError, match=re.escape(message)):
        regroup(optimizer, other)
    saved = named_state(optimizer)
    plan = plan_restore(saved, other.create(make_params()))
    assert plan.changes == (message,)
    assert plan.missing_kinds == {"optimizer"}
    assert not regroup(optimizer, other, allow={"optimizer"})[1].dropped
    assert plan_restore(saved, wrapped(averages(old)).create(make_params())).is_exact


@pytest.mark.parametrize("config", [Config(decay=0.5), Config(dtype="bfloat16")], ids=str)
def test_numbers_and_dtypes_of_a_user_s_function_may_change(config: Config) -> None:
    optimizer, other = trained(wrapped(averages(Config())), 1), wrapped(averages(config))
    assert plan_restore(named_state(optimizer), other.create(make_params())).is_exact
    assert not regroup(optimizer, other)[1].dropped


class Listed(NamedTuple):
    velocity: Any


def listing(of: Callable[[jax.Array], Any]) -> Any:
    """A user's transformation that keeps a list with an entry per parameter."""

    def init(params: Any) -> Listed:
        return Listed([of(jnp.zeros_like(leaf)) for leaf in jax.tree.leaves(params)])

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        grads, structure = jax.tree.flatten(updates)
        moved = [
            jax.tree.map(lambda v, g=g: v + of(g) if v.ndim < 1 else v + g, old)
            for old, g in zip(state.velocity, grads, strict=True)
        ]
        return jax.tree.unflatten(structure, grads), Listed(moved)

    return optax.GradientTransformation(init, update)


def test_a_list_with_an_entry_per_parameter_follows_the_parameters() -> None:
    """A new parameter in front shifts the entries: each would go on with its neighbour's."""
    few = {"b": jnp.ones(3), "c": jnp.ones(3)}
    more = {"a": jnp.ones(3), **few}
    for of in (lambda leaf: leaf, lambda leaf: (leaf, leaf)):
        definition = wrapped(optax.chain(optax.clip(9.0), listing(of)))
        described = describe_state(definition.create(few)).leaves
        assert {leaf.parameter: (leaf.role, leaf.dimensions) for leaf in described} == {
            ("b",): ("moment", (0,)),
            ("c",): ("moment", (0,)),
        }
        optimizer = definition.create(few).apply_gradient({"b": jnp.ones(3), "c": -jnp.ones(3)})
        plan = plan_restore(named_state(optimizer), definition.create(more), allow={"initialise"})
        found = plan.apply().state.param_states[1].velocity
        first = [jax.tree.leaves(entry)[0].tolist() for entry in found]
        assert first == [[0.0] * 3, [1.0] * 3, [-1.0] * 3]
        assert plan_restore(named_state(optimizer), definition.create(few)).is_exact


def test_a_list_of_scalars_continues_with_the_same_parameters_only() -> None:
    """Nothing shows which parameter a scalar is made of."""
    few = {"b": jnp.ones(3), "c": jnp.ones(3)}
    definition = wrapped(listing(jnp.sum))
    assert {leaf.source for leaf in describe_state(definition.create(few)).leaves} == {"types"}
    saved = named_state(definition.create(few).apply_gradient(few))
    assert plan_restore(saved, definition.create(few)).is_exact
    plan = plan_restore(saved, definition.create({"a": jnp.ones(3), **few}))
    assert plan.missing_kinds == {"initialise", "drop"}
    rows = [row for row in plan.rows if row.leaf.transformation]
    assert {row.action for row in rows} == {"initialised"}
    assert "it concatenates parameters" in rows[0].note


def every(n: int) -> Callable[[Any], Any]:
    return lambda step: step % n == 0


@pytest.mark.parametrize("wrapper", [optax.conditionally_transform, optax.conditionally_mask])
def test_a_condition_before_moments(wrapper: Any) -> None:
    """What Adam learns of rare updates makes its steps too long where they are not rare."""

    def made(n: int, *, is_last: bool = False) -> OptimizerDef:
        condition = wrapper(optax.scale(2.0), every(n))
        parts = (optax.trace(0.9), condition) if is_last else (condition, optax.trace(0.9))
        return wrapped(optax.chain(*parts))

    optimizer = trained(made(2), 1)
    name = wrapper.__name__
    message = (
        f"`should_transform_fn` of `{name}`, which acts before `trace`, was every(n=2), is "
        "every(n=3)"
    )
    with pytest.raises(SurgeryError, match=re.escape(message)):
        regroup(optimizer, made(3))
    saved = named_state(optimizer)
    plan = plan_restore(saved, made(3).create(make_params()))
    assert plan.changes == (message,)
    assert plan.missing_kinds == {"optimizer"}
    assert plan_restore(saved, made(2).create(make_params())).is_exact
    last = named_state(trained(made(2, is_last=True), 1))
    assert plan_restore(last, made(3, is_last=True).create(make_params())).is_exact


def flat(*steps: int) -> OptimizerDef:
    tx: Any = optax.flatten(optax.trace(0.9))
    for every_k in steps:
        tx = optax.MultiSteps(tx, every_k).gradient_transformation()
    return wrapped(tx)


def test_an_open_window_inside_of_another_stays_there() -> None:
    with pytest.raises(SurgeryError, match="is open, which is `multi_steps#2` now"):
        regroup(trained(flat(2, 3), 4), flat(3, 2))
    assert not regroup(trained(flat(2, 3), 4), flat(2, 3))[1].dropped


def test_parameters_one_after_the_other_stay_so() -> None:
    """`flatten` keeps one vector for all: the names of its parameters are not in it."""
    whole = {"w": FROZEN, "b": flat()}
    rules = [(name, name, definition) for name, definition in whole.items()]
    swapped = [("w", "b", FROZEN), ("b", "w", flat())]
    old = MultiOptimizer.from_rules(rules).create({"w": jnp.ones(8), "b": jnp.ones(8)})
    with pytest.raises(SurgeryError, match="trained state would be dropped"):
        regroup(old, MultiOptimizer.from_rules(swapped))
    assert not regroup(old, MultiOptimizer.from_rules(rules))[1].dropped


def test_settings_that_give_the_state_its_meaning() -> None:
    optimizer = trained(wrapped(contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9)))
    other = wrapped(contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.8))
    with pytest.raises(SurgeryError, match=r"`b1` of `schedule_free` was 0\.9, is 0\.8"):
        regroup(optimizer, other, allow=EVERYTHING)


def plateau(size: int) -> OptimizerDef:
    return wrapped(optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(accumulation_size=size)))


def test_a_number_that_must_be_above_a_count() -> None:
    optimizer = plateau(5).create(make_params())
    for _ in range(3):
        optimizer = optimizer.apply_gradient(gradients(0), value=1.0)
    with pytest.raises(SurgeryError, match="must be above `count`, which is 3"):
        regroup(optimizer, plateau(3), allow=EVERYTHING)
    assert regroup(optimizer, plateau(4))[1].initialised == ()


def test_an_open_window() -> None:
    optimizer = trained(multi_steps(optax.adamw(0.01), 4), 2)
    for target in (multi_steps(optax.adamw(0.01), 2), opt.adamw(0.01)):
        with pytest.raises(SurgeryError, match="a window is open, `mini_step` is 2"):
            regroup(optimizer, target, allow=EVERYTHING)
        regroup(advanced(optimizer, 2), target)
    clipped = multi_steps(optax.chain(optax.clip(1e9), optax.adamw(0.01)), 4)
    found, report = regroup(optimizer, clipped)
    assert report.initialised == report.dropped == ()
    assert_same(advanced(found, 4).target, advanced(optimizer, 4).target)
    assert len(freeze(optimizer, "b")[1].dropped) == 3


def test_an_open_window_of_unknown_length_is_not_the_same() -> None:
    """Nothing can be seen of a bound method of a list: its type says nothing of the length."""
    one, other = (wrapped(steps_of([object()].pop)) for _ in range(2))
    optimizer = one.create(make_params())
    regroup(optimizer, other)
    states = optimizer.state.param_states._replace(mini_step=jnp.int32(1))
    started = optimizer.replace(state=optimizer.state.replace(param_states=states))
    with pytest.raises(SurgeryError, match="it is not known whether the new definition's windows"):
        regroup(started, other, allow=EVERYTHING)


def steps_of(every_k: Any) -> Any:
    return optax.MultiSteps(optax.sgd(0.1), every_k).gradient_transformation()


RATES: dict[str, Callable[[], Any]] = {
    "prodigy": lambda: contrib.prodigy(1.0),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(1.0),
    "dog": lambda: contrib.dog(1.0),
    "dowg": lambda: contrib.dowg(1.0),
    "momo": lambda: contrib.momo(1.0),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
    "lbfgs": lambda: optax.lbfgs(1.0, linesearch=None),
}


@pytest.mark.parametrize("name", RATES)
def test_numbers_made_of_all_parameters_are_of_no_others(name: str) -> None:
    """They go on where the parameters are the same; otherwise somebody has to say so."""
    definition = wrapped(RATES[name]())
    optimizer = definition.create(make_params())
    extra = {"value": 1.0} if name == "momo" else {}
    for _ in range(2):
        optimizer = optimizer.apply_gradient(gradients(0), **extra)
    words = "made of all its parameters, of which 1 gone"
    with pytest.raises(SurgeryError, match=words):
        freeze(optimizer, "b")
    _, report = freeze(optimizer, "b", allow={"optimizer"})
    statistics = {change.path for change in report.changes if change.leaf.role == "statistic"}
    assert statistics <= {*report.kept}
    groups = MultiOptimizer.from_rules([("b", "b", definition), ("w", "w", definition)])
    with pytest.raises(SurgeryError, match=words):
        regroup(optimizer, groups, allow=EVERYTHING - {"optimizer"})
    _, report = regroup(optimizer, MultiOptimizer.from_rules([("all", ".*", definition)]))
    assert not report.initialised
    source = named_state(optimizer)
    target = groups.create(make_params())
    plan = plan_restore(source, target, allow=EVERYTHING - {"optimizer"})
    assert not plan.is_ok
    assert sum(words in change for change in plan.changes) == 2
    assert plan_restore(source, target, allow=EVERYTHING).is_ok


def test_parameters_on_an_excursion() -> None:
    sam = contrib.sam(optax.sgd(0.1), optax.chain(optax.sgd(0.1)), sync_period=2)
    optimizer = trained(MultiOptimizer.from_rules([("all", ".*", wrapped(sam))]), 1)
    changes: list[Callable[[], Any]] = [
        lambda: freeze(optimizer, "b"),
        lambda: reset(optimizer, "all"),
        lambda: regroup(optimizer, opt.sgd(0.1), allow=EVERYTHING),
    ]
    for change in changes:
        with pytest.raises(SurgeryError, match=r"a window is open, `.*steps_since_sync` is 1"):
            change()
    optimizer = advanced(optimizer, 1)
    freeze(optimizer, "b")
    regroup(optimizer, opt.sgd(0.1))


# Adafactor.


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 8)])
def test_factors_of_other_dimensions(shape: tuple[int, ...]) -> None:
    def factored(*dims: str) -> OptimizerDef:
        table = opt_adafactor.HParamMap(
            [(".*", tuple(opt_adafactor.FactorDim[dim] for dim in dims))]
        )
        return opt_adafactor.Adafactor(
            0.01, factor_map=table, min_dim_size_to_factor=4, respect_rank2_rules=True
        )

    rest = ["BATCH"] * (len(shape) - 2)
    one, other = factored("ROW", *rest, "COLUMN"), factored("COLUMN", *rest, "ROW")
    params = {"w": jnp.arange(float(np.prod(shape))).reshape(shape)}
    optimizer = one.create(params).apply_gradient(params)
    with pytest.raises(SurgeryError, match="factored of `w` in `adafactor`"):
        regroup(optimizer, other)
    found, report = regroup(optimizer, other, allow=EVERYTHING)
    assert {"w/v_row", "w/v_col"} <= set(report.initialised)
    assert not found.state.param_states["w"].v_row.any()


# Schedules.


def test_schedules_continue() -> None:
    optimizer = trained(opt.adam(0.1), 5)
    found, report = regroup(optimizer, opt.adam(schedule()))
    assert counts(found, "schedule_count") == [5]
    assert counts(found, "count") == [5]
    assert [c.note for c in report.changes if c.action == "initialised"] == [
        "continues from `step`"
    ]
    found, _ = regroup(optimizer, opt.adam(schedule()), schedules="restart")
    assert counts(found, "schedule_count") == [0]
    assert counts(found, "count") == [5]
    with pytest.raises(GroupError, match="'continue' or 'restart', found 'again'"):
        regroup(optimizer, opt.adam(0.1), schedules="again")  # type: ignore[arg-type]


def test_the_schedule_of_unfrozen_leaves() -> None:
    rules = [("w", "w", opt.adam(schedule())), ("b", "b", FROZEN)]
    optimizer = trained(MultiOptimizer.from_rules(rules), 5)
    found, _ = unfreeze(optimizer, "b", opt.adam(schedule()))
    assert counts(found, "schedule_count") == [5, 5]
    assert counts(found, "count") == [0, 5]
    found, _ = unfreeze(optimizer, "b", opt.adam(schedule()), schedules="restart")
    assert counts(found, "schedule_count") == [0, 5]
    found, _ = reset(optimizer, "w")
    assert counts(found, "schedule_count") == [5]
    assert counts(found, "count") == [0]


def test_schedules_inside_of_windows_count_updates() -> None:
    optimizer = trained(multi_steps(optax.adam(0.1), 2), 6)
    found, _ = regroup(optimizer, multi_steps(optax.adam(schedule()), 2))
    assert counts(found, "schedule_count") == [3]
    rules = [("w", "w", multi_steps(optax.adam(0.1), 2)), ("b", "b", FROZEN)]
    optimizer = trained(MultiOptimizer.from_rules(rules), 6)
    found, _ = unfreeze(optimizer, "b", multi_steps(optax.sgd(schedule()), 2))
    assert counts(found, "schedule_count") == [3]


def test_a_moved_group_takes_the_schedule_of_its_source() -> None:
    one, two = opt.sgd(schedule()), opt.adam(schedule())
    optimizer = trained(MultiOptimizer.from_rules([("a", "w", one), ("b", "b", two)]), 2)
    states = dict(optimizer.state.param_states)
    later = jax.tree.map(lambda x: x + 7 if x.dtype == jnp.int32 else x, states["b"])
    states = type(optimizer.state.param_states)(states | {"b": later})
    optimizer = optimizer.replace(state=optimizer.state.replace(param_states=states))
    found, _ = regroup(optimizer, MultiOptimizer.from_rules([("x", "w", one), ("y", "b", two)]))
    assert sorted(counts(found, "schedule_count")) == [2, 9]


def test_a_rate_that_was_set_at_run_time() -> None:
    def injected(rate: float) -> OptimizerDef:
        return wrapped(optax.inject_hyperparams(optax.adam)(learning_rate=rate))

    optimizer = trained(injected(0.1))
    states = optimizer.state.param_states
    hyper = states.hyperparams | {"learning_rate": jnp.float32(0.05)}
    state = optimizer.state.replace(param_states=states._replace(hyperparams=hyper))
    optimizer = optimizer.replace(state=state)
    same, _ = freeze(optimizer, "b")
    inner = same.state.param_states["rest"].hyperparams
    assert float(inner["learning_rate"]) == np.float32(0.05)
    found, report = regroup(optimizer, injected(0.3))
    assert float(found.state.param_states.hyperparams["learning_rate"]) == np.float32(0.3)
    assert report.initialised == ("hyperparams/learning_rate",)
    _, report = regroup(optimizer, opt.adam(0.1))
    assert len(report.kept) == 5


def test_a_key_continues_in_one_group() -> None:
    params = {"u": jnp.ones(3), "v": jnp.ones(3)}
    zeros = jax.tree.map(jnp.zeros_like, params)

    def noisy(seed: int) -> OptimizerDef:
        return wrapped(optax.chain(optax.add_noise(0.1, 0.5, seed), optax.scale(-1.0)))

    optimizer = noisy(0).create(params).apply_gradient(zeros)
    groups = MultiOptimizer.from_rules([("u", "u", noisy(1)), ("v", "v", noisy(2))])
    found, report = regroup(optimizer, groups)
    keys = [c for c in report.changes if c.leaf.role == "key"]
    assert [(c.action, c.note) for c in keys] == [
        ("kept", ""),
        ("initialised", "its key continues in another group"),
    ]
    states, fresh = (o.state.param_states["v"] for o in (found, groups.create(params)))
    assert bool(states[0].rng_key == fresh[0].rng_key)
    moved = found.apply_gradient(zeros).target
    before = found.target
    assert not jnp.array_equal(moved["u"] - before["u"], moved["v"] - before["v"])
    back, report = regroup(found, noisy(0))
    assert [c.action for c in report.changes if c.leaf.role == "key"] == ["kept", "dropped"]
    _, report = freeze(back, "u")
    assert not report.initialised


def test_reset_keeps_what_was_set_at_run_time() -> None:
    injected = wrapped(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    optimizer = trained(MultiOptimizer.from_rules([("w", "w", injected)], rest=opt.adam(0.1)))
    optimizer.state.param_states["w"].hyperparams["learning_rate"] = jnp.float32(0.007)
    found, report = reset(optimizer, "w")
    state = found.state.param_states["w"]
    assert float(state.hyperparams["learning_rate"]) == np.float32(0.007)
    assert "w/hyperparams/learning_rate" in report.kept
    assert not state.inner_state[0].mu["w"].any()


def test_reset_keeps_the_updates_of_a_window() -> None:
    inner = multi_steps(optax.adam(schedule()), 4)
    optimizer = trained(MultiOptimizer.from_rules([("w", "w", inner)], rest=opt.adam(0.1)), 6)
    found, report = reset(optimizer, "w")
    state = found.state.param_states["w"]
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)
    assert counts(found, "schedule_count") == [1]
    assert "w/gradient_step" in report.kept
    assert not state.acc_grads["w"].any()


def test_shardings_that_cannot_place_a_leaf_name_it() -> None:
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    definition = MultiOptimizer.from_rules([("w", "w", opt.adam(0.1))], rest=opt.adam(0.1))
    optimizer = trained(definition)

    def everywhere(place: Any) -> Any:
        return jax.tree.map(lambda _: place, optimizer.state.param_states)

    def message(shardings: Any) -> str:
        with pytest.raises(GroupError) as caught:
            regroup(optimizer, definition, shardings=shardings)
        return str(caught.value)

    found = message(everywhere(P("x")))
    assert found.splitlines()[0] == (
        f"`shardings`: of `w/0/count`, expected a sharding or `None`, found {P('x')!r}: "
        "give `NamedSharding(mesh, spec)`"
    )
    found = message(everywhere(NamedSharding(mesh, P("x"))))
    assert found.startswith("`shardings`: of `w/0/count`, expected a sharding that divides the")
    assert "w/0/mu/w" not in found
    with pytest.raises(GroupError, match="`shardings`: of `w/0/count`"):
        reset(optimizer, "w", shardings=everywhere(P("x")))
    found = message({"w": None})
    assert "; at the top expected GroupStates of ['w', 'rest'], found dict of ['w']" in found
    states = optimizer.state.param_states
    cut = type(states)({**states, "w": [None]})
    assert "; at `w` expected tuple of ['0', '1'], found list" in message(cut)


# Where leaves are placed.


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: Any) -> Any:
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(request.param,) * 2)


def sharded_params(mesh: Any) -> Any:
    specs = {"w": P(None, "model"), "b": P("model")}
    return {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in make_params().items()}


def spec_of(leaf: Any) -> tuple[Any, ...]:
    spec = tuple(leaf.sharding.spec)
    return (*spec, *(None,) * (leaf.ndim - len(spec)))


def test_new_leaves_are_placed_as_their_parameter(mesh: Any) -> None:
    with jax.set_mesh(mesh):
        optimizer = opt.sgd(0.1).create(sharded_params(mesh))
        found, _ = regroup(optimizer, opt.adam(0.1))
        state = found.state.param_states[0]
        assert spec_of(state.mu["w"]) == (None, "model")
        assert spec_of(state.mu["b"]) == ("model",)
        assert spec_of(state.count) == ()
        factored, _ = regroup(optimizer, opt.adafactor(0.1, min_dim_size_to_factor=4))
        described = describe_state(factored).leaves
        leaves = jax.tree.leaves(factored.state.param_states)
        for leaf, value in zip(described, leaves, strict=True):
            if leaf.parameter == ("w",) and leaf.role == "factored":
                assert spec_of(value) == tuple(
                    {0: None, 1: "model"}[d or 0] for d in leaf.dimensions or ()
                )


def test_what_zero_has_sharded_stays_so(mesh: Any) -> None:
    with jax.set_mesh(mesh):
        optimizer = opt.adam(0.1).create(sharded_params(mesh))
        further = NamedSharding(mesh, P("data", "model"))

        def place(leaf: Any) -> Any:
            return jax.device_put(leaf, further) if leaf.ndim == 2 else leaf

        states = jax.tree.map(place, optimizer.state.param_states)
        optimizer = optimizer.replace(state=optimizer.state.replace(param_states=states))
        for new in (opt.adamw(0.1), opt.adabelief(0.1)):
            found, _ = regroup(optimizer, new, allow={"drop"})
            assert spec_of(found.state.param_states[0].mu["w"]) == ("data", "model")
        grouped, _ = regroup(optimizer, MultiOptimizer.from_rules([("all", ".*", opt.adam(0.1))]))
        again, _ = reset(grouped, "all")
        assert spec_of(again.state.param_states["all"][0].nu["w"]) == ("data", "model")
        fresh = opt.sgd(0.1).create(sharded_params(mesh))
        shapes = jax.eval_shape(opt.adam(0.1).create, fresh.target).state.param_states
        shardings = jax.tree.map(lambda x: further if x.ndim == 2 else None, shapes)
        found, _ = regroup(fresh, opt.adam(0.1), shardings=shardings)
        assert spec_of(found.state.param_states[0].mu["w"]) == ("data", "model")
        assert spec_of(found.state.param_states[0].mu["b"]) == ("model",)
        with pytest.raises(GroupError, match="`shardings`: expected a tree like"):
            regroup(fresh, opt.adam(0.1), shardings={"w": further})


def test_reset_makes_the_state_of_one_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [("w", "w", opt.adam(0.1)), ("b", "b", opt.adamax(0.1))]
    optimizer = trained(MultiOptimizer.from_rules(rules))
    describe_state(optimizer)
    made: list[Any] = []
    init: Callable[..., Any] = opt.OptaxWrapper.init_state

    def noted(self: Any, params: Any) -> Any:
        made.append(sorted(k for k, x in params.items() if jax.tree.leaves(x)))
        return init(self, params)

    monkeypatch.setattr(opt.OptaxWrapper, "init_state", noted)
    found, report = reset(optimizer, "b")
    assert made == [["b"]]
    assert all(path.startswith("w/") for path in report.kept)
    assert found.state.param_states["w"][0].mu["w"] is optimizer.state.param_states["w"][0].mu["w"]


def test_on_shapes_and_under_jit() -> None:
    definition = wrapped(optax.chain(optax.clip(1.0), optax.adamw(0.01)))
    optimizer = trained(opt.adamw(0.01))
    found, report = regroup(optimizer, definition)
    traced = jax.jit(lambda o: regroup(o, definition)[0])(optimizer)
    assert_same(traced.state, found.state)
    shapes = jax.eval_shape(lambda: optimizer)
    abstract, of_shapes = regroup(shapes, definition)
    assert of_shapes.kept == report.kept
    assert jax.tree.map(jnp.shape, abstract.state) == jax.tree.map(jnp.shape, found.state)
    window = trained(multi_steps(optax.adamw(0.01), 2), 1)
    with pytest.raises(GroupError, match="outside of compiled functions"):
        jax.jit(lambda o: regroup(o, opt.adamw(0.01))[0])(window)


def test_words_that_are_not_known() -> None:
    optimizer = opt.sgd(0.1).create(make_params())
    with pytest.raises(ValueError, match=r"`allow`: expected words among \['cast', 'drop'"):
        regroup(optimizer, opt.sgd(0.1), allow={"forget"})
    with pytest.raises(TypeError, match="found the string 'drop'"):
        regroup(optimizer, opt.sgd(0.1), allow="drop")


def test_a_group_inside_a_chain() -> None:
    """A chain around groups has an `adam` for each; surgery knows them by their parameters."""
    params = {"a": {"w": jnp.ones(2), "b": jnp.ones(1)}, "c": {"b": jnp.ones(3)}}

    def chained(*rules: Any, rest: Any = None) -> Any:
        return opt.chain(opt.clip(1.0), MultiOptimizer.from_rules(rules, rest=rest))

    plain = ("plain", ".*/b", opt.adam(0.1))
    optimizer = chained(("decayed", ".*/w", opt.adam(0.1)), plain).create(params)
    optimizer = optimizer.apply_gradient(params)
    with pytest.raises(GroupError, match=r"would leave it.*\n  `decayed` \('\.\*/w'\) matches no"):
        freeze(optimizer, ".*/w")
    found, report = regroup(optimizer, chained(plain, rest=FROZEN), allow={"drop", "optimizer"})
    assert not report.initialised
    kept = {leaf.parameter for leaf in describe_state(found).leaves if leaf.role == "moment"}
    assert kept == {("a", "b"), ("c", "b")}
    moments = [x for x in jax.tree.leaves(found.state.param_states) if x.shape == (3,)]
    assert all(x.any() for x in moments)


def test_as_transformation_is_not_a_change() -> None:
    """It computes what it wraps: neither surgery nor a plan needs leave to add or remove it."""
    plain = opt.chain(opt.clip(1.0), opt.adam(0.1)).create(make_params())
    wrapped = opt.chain(opt.clip(1.0), opt.as_transformation(opt.adam(0.1)))
    assert regroup(plain, wrapped)[1].initialised == ()
    assert plan_restore(named_state(plain), wrapped.create(make_params())).changes == ()
    assert plan_restore(named_state(wrapped.create(make_params())), plain).changes == ()
