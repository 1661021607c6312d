"""Groups of wrapped Optax optimizers: against Optax alone, with T5X's facade, sharded, compiled."""

import functools
import warnings
from typing import Any

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import opt_core
import opt_optax_bridge as opt
import optax
import optax.contrib
import pytest
from flax.core import freeze
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_core import (
    FROZEN,
    MultiOptimizer,
    Optimizer,
    OptimizerDef,
    OptimizerState,
    describe,
    group_metrics,
    increment_step,
    regroup,
)
from opt_core.errors import HyperParamError, RestoreError, UnusedArgumentError
from opt_optax_bridge import t5x

contrib: Any = optax.contrib  # exports without saying so


def make_params() -> Any:
    draw = np.random.default_rng(0)
    shapes = {
        "embed": {"embedding": (16, 8)},
        "layer": {"kernel": (8, 32), "bias": (32,), "scale": (8,)},
        "out": {"kernel": (32, 8), "bias": (8,)},
    }
    return jax.tree.map(
        lambda s: jnp.asarray(draw.normal(size=s), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


GRADS = jax.tree.map(lambda p: 0.1 * p + 0.01, make_params())
AXES = {
    "embed": {"embedding": P("vocab", "embed")},
    "layer": {"kernel": P("embed", "mlp"), "bias": P("mlp"), "scale": P("embed")},
    "out": {"kernel": P("mlp", "embed"), "bias": P("embed")},
}
LABELS = {
    "embed": {"embedding": "tables"},
    "layer": {"kernel": "kernels", "bias": "vectors", "scale": "vectors"},
    "out": {"kernel": "kernels", "bias": "vectors"},
}
RULES = {"tables": "embed/.*", "kernels": ".*/kernel", "vectors": ".*/(bias|scale)"}


class PerParameter(OptimizerDef):
    """A state per parameter, as T5X's Adafactor has one."""

    def init_state(self, params: Any) -> OptimizerState:
        states = jax.tree.map(lambda p: {"m": jnp.zeros_like(p), "v": jnp.zeros((1,))}, params)
        return OptimizerState(jnp.zeros((), jnp.int32), states)

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        leaves = jax.tree.leaves(params)
        treedef: Any = jax.tree.structure(params)
        states, gradients = map(treedef.flatten_up_to, (state.param_states, grads))
        new = [{"m": s["m"] + g, "v": s["v"]} for s, g in zip(states, gradients, strict=True)]
        moved = [p - 0.1 * s["m"] for p, s in zip(leaves, new, strict=True)]
        state = OptimizerState(increment_step(state.step), treedef.unflatten(new))
        return treedef.unflatten(moved), state


def mask_of(wanted: str) -> Any:
    """A mask over the whole tree, as users of Optax write one."""
    return jax.tree.map(lambda label: label == wanted, LABELS)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)

# One transformation per group; every kind of state.
MIXTURES: dict[str, dict[str, Any]] = {
    "adamw": {name: functools.partial(optax.adamw, 1e-2 * (i + 1)) for i, name in enumerate(RULES)},
    "three kinds": {
        "tables": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
        "kernels": lambda: optax.adamw(SCHEDULE),
        "vectors": lambda: optax.sgd(1e-2),
    },
    "masks": {
        "tables": lambda: optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        "kernels": lambda: optax.adamw(1e-2, mask=mask_of("kernels")),
        "vectors": lambda: optax.masked(optax.sgd(1e-2, momentum=0.9), mask_of("tables")),
    },
    "wrappers": {
        "tables": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
        "kernels": lambda: optax.partition({"a": optax.lion(1e-3), "b": optax.sgd(1e-2)}, ab()),
        "vectors": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    },
    "stateless": dict.fromkeys(RULES, lambda: optax.sgd(1e-2)),
    "clipped": {
        "tables": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.rmsprop(1e-2)),
        "kernels": lambda: contrib.muon(1e-2),
        "vectors": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    },
}


def ab() -> Any:
    return {
        "embed": {"embedding": "a"},
        "layer": {"kernel": "a", "bias": "a", "scale": "b"},
        "out": {"kernel": "b", "bias": "a"},
    }


def definition_of(mixture: str, **changed: Any) -> MultiOptimizer:
    makers = {**MIXTURES[mixture], **changed}
    wrapped = {
        name: make if isinstance(make, OptimizerDef) else opt.OptaxWrapper(make())
        for name, make in makers.items()
    }
    return MultiOptimizer.from_rules([(name, RULES[name], wrapped[name]) for name in RULES])


every_mixture = pytest.mark.parametrize("mixture", MIXTURES)


@every_mixture
def test_every_group_is_optax_on_its_leaves(mixture: str) -> None:
    """`optax.partition` gives every transformation the same leaves: the same updates."""
    optimizer = definition_of(mixture).create(make_params())
    labels = LABELS
    tx = optax.partition({name: as_tx(make()) for name, make in MIXTURES[mixture].items()}, labels)
    params, state = make_params(), tx.init(make_params())
    traces = []

    @jax.jit
    def step(optimizer: Optimizer, grads: Any) -> Optimizer:
        traces.append(1)
        return optimizer.apply_gradient(grads)

    @jax.jit
    def theirs(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for t in range(3):
        grads = jax.tree.map(lambda g, t=t: g * (t + 1), GRADS)
        optimizer = step(optimizer, grads)
        params, state = theirs(params, state, grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        optimizer.target,
        params,
    )
    assert len(traces) == 1


def as_tx(tx: Any) -> Any:
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx


# FrozenDicts where Optax is not given a mask or labels in dicts.
CHECKPOINTS = [
    *((mixture, dict, False) for mixture in MIXTURES),
    *(("three kinds", container, True) for container in (dict, freeze)),
    ("clipped", freeze, False),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("mixture", "container", "other"), CHECKPOINTS)
def test_through_a_checkpoint(mixture: str, container: Any, other: bool) -> None:
    """Beside a definition with a state per parameter, too."""
    changed = {"tables": PerParameter(None)} if other else {}
    optimizer = definition_of(mixture, **changed).create(container(make_params()))
    optimizer = optimizer.apply_gradient(container(GRADS))
    written = flax.serialization.msgpack_serialize(optimizer.state_dict())
    fresh = definition_of(mixture, **changed).create(container(make_params()))
    restored = fresh.restore_state(flax.serialization.msgpack_restore(written))
    assert jax.tree.structure(restored) == jax.tree.structure(optimizer)  # type: ignore[operator]
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(optimizer), strict=True)
    assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
    groups = set(optimizer.state_dict()["state"].get("param_states", {}))
    assert groups <= set(RULES)
    assert bool(groups) == (mixture != "stateless")  # a group that keeps nothing has no entry


@every_mixture
def test_logical_axes_of_every_leaf(mixture: str) -> None:
    definition = definition_of(mixture)
    optimizer = definition.create(jax.eval_shape(make_params))
    derived = definition.derive_logical_axes(optimizer, AXES)
    assert derived.target == AXES
    for name, group in definition.split(optimizer).items():
        alone = group.optimizer_def.derive_logical_axes(  # type: ignore[attr-defined]
            group, jax.tree.map(lambda _: P(), group.target)
        )
        found = derived.state.param_states[name]
        assert jax.tree.structure(alone.state.param_states, is_leaf=is_axes) == jax.tree.structure(  # type: ignore[operator]
            found, is_leaf=is_axes
        )
        leaves = jax.tree.leaves(group.state.param_states)
        axes = jax.tree.leaves(found, is_leaf=is_axes)
        matrices = [(x, a) for x, a in zip(leaves, axes, strict=True) if x.ndim == 2]
        assert all(a is not None and len(a) == 2 for _, a in matrices)


def is_axes(x: Any) -> bool:
    return x is None or isinstance(x, P)


def test_states_are_sharded_as_derived() -> None:
    mesh = Mesh(
        np.asarray(jax.devices()[:8]).reshape(4, 2), ("data", "model"), (AxisType.Auto,) * 2
    )
    definition = definition_of("three kinds", vectors=PerParameter(None))
    shapes = definition.create(jax.eval_shape(make_params))
    rules = {"vocab": "data", "embed": None, "mlp": "model"}

    def to_mesh(spec: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*(rules[name] for name in spec or ())))

    axes = definition.derive_logical_axes(shapes, AXES)
    shardings = jax.tree.map(to_mesh, axes, is_leaf=is_axes)
    optimizer = jax.jit(lambda: definition.create(make_params()), out_shardings=shardings)()
    step = jax.jit(
        lambda o, g: o.apply_gradient(g),
        in_shardings=(shardings, shardings.target),
        out_shardings=shardings,
        donate_argnums=0,
    )
    stepped = step(optimizer, jax.device_put(GRADS, shardings.target))
    count, mu, _ = stepped.state.param_states["kernels"][0]
    assert mu["layer"]["kernel"].sharding.spec == P(None, "model")
    assert stepped.state.param_states["vectors"]["layer"]["bias"]["m"].sharding.spec == P("model")
    plain = definition.create(make_params()).apply_gradient(GRADS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), stepped, plain
    )
    restored = stepped.restore_state(jax.tree.map(np.asarray, plain.state_dict()))
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(stepped), strict=True)
    assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
    assert int(count) == 1


# What is compiled.


def cost(function: Any, *operands: Any) -> dict[str, float]:
    found: Any = jax.jit(function).lower(*operands).compile().cost_analysis()
    counts: dict[str, float] = found[0] if isinstance(found, list) else found
    return counts


@pytest.mark.parametrize("mixture", ["adamw", "three kinds", "stateless"])
def test_a_compiled_step_accesses_no_more_than_optax_partition(mixture: str) -> None:
    optimizer = definition_of(mixture).create(make_params())
    tx = optax.partition({name: make() for name, make in MIXTURES[mixture].items()}, LABELS)

    def theirs(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    ours = cost(lambda o, g: o.apply_gradient(g), optimizer, GRADS)
    reference = cost(theirs, make_params(), tx.init(make_params()), GRADS)
    # Ours counts steps besides: one int32 in, one out, and what XLA makes of the addition.
    assert ours["bytes accessed"] <= reference["bytes accessed"] + 32


def test_a_compiled_step_is_the_steps_of_its_groups() -> None:
    """No more work than the groups have, each compiled alone."""
    definition = definition_of("adamw")
    optimizer = definition.create(make_params())
    whole = cost(lambda o, g: o.apply_gradient(g), optimizer, GRADS)
    grads = definition.split(optimizer.replace(target=GRADS))
    alone = [
        cost(lambda o, g: o.apply_gradient(g), part, grads[name].target)
        for name, part in definition.split(optimizer).items()
    ]
    for key in ("bytes accessed", "flops"):
        assert whole[key] <= sum(c.get(key, 0.0) for c in alone), key


def test_frozen_leaves_are_not_read() -> None:
    rules = [("kernels", ".*/kernel", opt.adamw(1e-2))]
    optimizer = MultiOptimizer.from_rules(rules, rest=FROZEN).create(make_params())
    part = optimizer.optimizer_def.split(optimizer)["kernels"]  # type: ignore[attr-defined]
    grads = {k: {"kernel": GRADS[k]["kernel"]} for k in ("layer", "out")}

    def frozen_out(optimizer: Optimizer, grads: Any) -> Any:
        stepped = optimizer.apply_gradient(grads)
        return stepped.target["layer"]["kernel"], stepped.target["out"]["kernel"], stepped.state

    def alone(part: Optimizer, grads: Any) -> Any:
        stepped = part.apply_gradient({**part.target, **grads_like(part, grads)})
        return stepped.target["layer"]["kernel"], stepped.target["out"]["kernel"], stepped.state

    ours, theirs = cost(frozen_out, optimizer, grads), cost(alone, part, grads)
    assert ours["bytes accessed"] <= theirs["bytes accessed"] + 32


def grads_like(part: Optimizer, grads: Any) -> Any:
    return {
        outer: {k: grads[outer]["kernel"] if k == "kernel" else () for k in inner}
        for outer, inner in part.target.items()
        if outer in grads
    }


# Hyper-parameters.


def rules_of(**definitions: Any) -> MultiOptimizer:
    return MultiOptimizer.from_rules(
        [(k, RULES[k], v) for k, v in definitions.items()], rest=FROZEN
    )


def moved(before: Optimizer, after: Optimizer) -> set[str]:
    names = set()
    for name, part in before.optimizer_def.split(before).items():  # type: ignore[attr-defined]
        new = after.optimizer_def.split(after)[name].target  # type: ignore[attr-defined]
        pairs = zip(jax.tree.leaves(part.target), jax.tree.leaves(new), strict=True)
        if not all(np.array_equal(a, b) for a, b in pairs):
            names.add(name)
    return names


def test_rates_act_in_one_group_and_in_all() -> None:
    optimizer = rules_of(kernels=opt.adam(0.1), vectors=opt.sgd(0.1)).create(make_params())
    step = jax.jit(lambda o, r: o.apply_gradient(GRADS, learning_rate=r))
    assert moved(optimizer, step(optimizer, 0.0)) == set()
    assert moved(optimizer, step(optimizer, 0.1)) == {"kernels", "vectors"}
    alone = optimizer.apply_gradient(GRADS, group_overrides={"vectors": {"learning_rate": 0.0}})
    assert moved(optimizer, alone) == {"kernels"}
    with pytest.raises(HyperParamError, match=r"group `vectors`: .*b1"):
        optimizer.apply_gradient(GRADS, b1=0.5)
    opaque = rules_of(kernels=opt.adam(0.1), vectors=opt.OptaxWrapper(optax.sgd(0.1)))
    with pytest.raises(HyperParamError, match="group `vectors`: no such hyper-parameter: `learn"):
        opaque.create(make_params()).apply_gradient(GRADS, learning_rate=0.0)


def test_what_is_refused_says_which_group() -> None:
    optimizer = rules_of(kernels=opt.adagrad(0.1), vectors=opt.sgd(0.1)).create(make_params())
    overrides = {"kernels": {"initial_accumulator_value": 0.5}}
    with pytest.raises(
        HyperParamError, match="group `kernels`: `initial_accumulator_value` cannot"
    ):
        optimizer.apply_gradient(GRADS, group_overrides=overrides)


def test_extra_arguments_reach_who_uses_them() -> None:
    definition = rules_of(kernels=opt.polyak_sgd(), vectors=opt.adamw(0.1))
    optimizer = definition.create(make_params())
    one, two = (optimizer.apply_gradient(GRADS, value=v) for v in (0.1, 0.2))
    assert moved(one, two) == {"kernels"}
    with pytest.raises(UnusedArgumentError, match="`other`"):
        rules_of(kernels=opt.adamw(0.1)).create(make_params()).apply_gradient(GRADS, other=1.0)


# T5X.


def t5x_example(api: Any) -> Any:
    """The example of T5X's docstring, as it is written there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flax's, of the traversals
        kernels = flax.traverse_util.ModelParamTraversal(lambda path, _: "kernel" in path)
        biases = flax.traverse_util.ModelParamTraversal(lambda path, _: "bias" in path)
    kernel_opt = api.adam(learning_rate=0.01)
    bias_opt = api.adam(learning_rate=0.1)
    return kernels, kernel_opt, biases, bias_opt


@pytest.mark.parametrize("variadic", [True, False])
@pytest.mark.parametrize("api", [t5x, opt], ids=["t5x", "opt_optax_bridge"])
def test_the_example_of_t5x(api: Any, variadic: bool) -> None:
    """Two Adams; the second does nothing for 1,000 steps."""
    kernels, kernel_opt, biases, bias_opt = t5x_example(api)
    pairs = ((kernels, kernel_opt), (biases, bias_opt))
    made = getattr(api, "MultiOptimizer", MultiOptimizer)
    opt_def = made(*pairs) if variadic else made(pairs)
    optimizer = opt_def.create(make_params())

    traces = []

    @jax.jit
    def train_step(optimizer: Any, grads: Any, lr: Any) -> Any:
        traces.append(1)
        hparams = optimizer.optimizer_def.hyper_params
        step = optimizer.state.step
        return optimizer.apply_gradient(
            grads,
            hyper_params=[
                hparams[0].replace(learning_rate=0.2),
                hparams[1].replace(learning_rate=jnp.where(step < 1000, 0.0, lr)),
            ],
        )

    first = train_step(optimizer, GRADS, 0.1)
    assert moved(optimizer, first) == {"0"}
    # Adam's first step is the learning rate, in the gradient's direction.
    step = optimizer.target["layer"]["kernel"] - first.target["layer"]["kernel"]
    np.testing.assert_allclose(np.abs(step), 0.2, rtol=1e-3)
    last = first.replace(state=first.state.replace(step=jnp.int32(999)))
    still = train_step(last, GRADS, 0.1)
    assert moved(last, still) == {"0"}
    assert moved(still, train_step(still, GRADS, 0.1)) == {"0", "1"}
    assert len(traces) == 1
    assert first.target["layer"]["scale"] is not None
    assert np.array_equal(first.target["layer"]["scale"], optimizer.target["layer"]["scale"])


def facade() -> t5x.MultiOptimizer:
    kernels, kernel_opt, biases, bias_opt = t5x_example(t5x)
    return t5x.MultiOptimizer([(kernels, kernel_opt), (biases, bias_opt)])


def test_the_trainer_of_t5x_is_ignored_by_wrapped_optimizers_alone() -> None:
    optimizer = facade().create(make_params())
    plain = optimizer.apply_gradient(GRADS)
    given = optimizer.apply_gradient(GRADS, learning_rate=0.0)
    assert moved(plain, given) == set()
    overrides = {"0": {"learning_rate": 0.0}}
    alone = optimizer.apply_gradient(GRADS, learning_rate=9.0, group_overrides=overrides)
    assert moved(optimizer, alone) == {"1"}
    assert moved(plain, alone) == {"0"}
    with pytest.raises(HyperParamError, match="`weight_decay`"):
        optimizer.apply_gradient(GRADS, weight_decay=0.1)
    opaque = t5x.MultiOptimizer([(".*/kernel", t5x.OptaxWrapper(optax.sgd(0.1)))])
    with pytest.raises(HyperParamError, match="group `0`: `learning_rate` cannot be given"):
        opaque.create(make_params()).apply_gradient(
            GRADS, group_overrides={"0": {"learning_rate": 0.0}}
        )


def test_the_partitioner_of_t5x_passes_axes_through_state_dicts() -> None:
    optimizer = facade().create(freeze(jax.eval_shape(make_params)))
    definition = optimizer.optimizer_def
    axes = definition.derive_logical_axes(optimizer, freeze(AXES))  # type: ignore[attr-defined]
    written = axes.state_dict()
    assert written["state"]["step"] is None
    flat = flax.traverse_util.flatten_dict(written, keep_empty_nodes=True, sep="/")
    data = {
        path: P(*("data" for _ in spec)) if isinstance(spec, P) else spec
        for path, spec in flat.items()
    }
    restored = optimizer.restore_state(flax.traverse_util.unflatten_dict(data, sep="/"))
    assert restored.target["layer"]["scale"] == P("data")  # frozen
    assert restored.target["layer"]["kernel"] == P("data", "data")
    assert restored.state.param_states["0"][0].nu["out"]["kernel"] == P("data", "data")
    assert restored.state.step is None
    again = axes.restore_state(flax.traverse_util.unflatten_dict(data, sep="/"))
    assert again.target["layer"]["scale"] == P("data")


def test_parameters_in_another_precision_frozen_ones_too() -> None:
    optimizer = facade().create(make_params())
    written = optimizer.state_dict()
    written["target"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), written["target"])
    restored = optimizer.restore_state(written)
    assert {x.dtype for x in jax.tree.leaves(restored.target)} == {jnp.dtype(jnp.bfloat16)}
    with pytest.raises(RestoreError, match="target/layer/scale: dtype"):
        definition_of("adamw").create(make_params()).restore_state(written)


# The rest of it, with Optax's states.


def test_regrouping_keeps_moments_from_adam_to_adamw() -> None:
    optimizer = opt.adam(0.1).create(make_params()).apply_gradient(GRADS)
    new = rules_of(kernels=opt.adamw(0.1), vectors=opt.adabelief(0.1))
    found, report = regroup(optimizer, new, allow={"drop"})
    states = found.state.param_states
    assert np.array_equal(
        states["kernels"][0].mu["out"]["kernel"],
        optimizer.state.param_states[0].mu["out"]["kernel"],
    )
    assert int(states["kernels"][0].count) == 1
    assert all(path.startswith("kernels/0/") for path in report.kept)
    assert all(path.startswith("vectors/") for path in report.initialised)
    assert len(report.kept) == 5
    found.apply_gradient(GRADS)


def test_describe_and_metrics() -> None:
    optimizer = rules_of(kernels=opt.adamw(0.1), vectors=opt.sgd(0.2)).create(make_params())
    lines = str(describe(optimizer)).splitlines()
    assert "kernels" in lines[1]
    assert "learning_rate=0.1" in lines[1]
    assert "4.0 KiB" in lines[1]  # two moments and a count of 2 x 256 float32
    found = group_metrics(optimizer, GRADS, optimizer.apply_gradient(GRADS))
    assert found["rest"].update == 0
    assert found["vectors"].update_to_parameter == pytest.approx(
        0.2 * float(found["vectors"].gradient / found["vectors"].parameter), rel=1e-5
    )


@pytest.mark.parametrize("wrapper", ["masked", "multi_transform"])
def test_surgery_under_masks_of_the_whole_tree(wrapper: str) -> None:
    params = {"kernel": jnp.ones((3, 3)), "other": jnp.ones((3, 3)), "bias": jnp.ones(3)}
    mask = {"kernel": True, "other": True, "bias": False}
    labels = jax.tree.map(lambda kept: "adam" if kept else "sgd", mask)
    transforms: dict[Any, Any] = {"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}
    tx = {
        "masked": optax.masked(optax.adam(0.1), mask),
        "multi_transform": optax.multi_transform(transforms, labels),
    }[wrapper]
    grouped = MultiOptimizer.from_rules([("all", ".*", opt.OptaxWrapper(tx))])
    optimizer = grouped.create(params).apply_gradient(params)
    _, report = opt_core.freeze(optimizer, "bias")
    assert (len(report.kept), report.initialised, report.dropped) == (5, (), ())
    found, report = opt_core.freeze(optimizer, "other")
    assert (len(report.kept), report.initialised, len(report.dropped)) == (3, (), 2)
    stepped = found.apply_gradient(params).target
    expected = optimizer.apply_gradient(params).target
    assert jnp.array_equal(stepped["kernel"], expected["kernel"])


def test_surgery_of_a_tuple_of_parameters_and_a_chain() -> None:
    params = (jnp.ones((3, 3)), jnp.ones(3))
    optimizer = opt.adam(0.1).create(params).apply_gradient(params)
    found, report = opt_core.freeze(optimizer, "1")
    assert (len(report.kept), report.initialised, len(report.dropped)) == (3, (), 2)
    expected = optimizer.apply_gradient(params).target[0]
    assert jnp.array_equal(found.apply_gradient(params).target[0], expected)


def test_a_recorded_rate_is_the_new_definitions() -> None:
    def injected(rate: float) -> OptimizerDef:
        return opt.OptaxWrapper(optax.inject_hyperparams(optax.adam)(learning_rate=rate))

    params = {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)}
    grouped = MultiOptimizer.from_rules([("a", "kernel", injected(0.1))], rest=injected(0.2))
    optimizer = grouped.create(params).apply_gradient(params)
    found, report = opt_core.regroup(optimizer, injected(0.3))
    assert float(found.state.param_states.hyperparams["learning_rate"]) == np.float32(0.3)
    assert report.initialised == ("hyperparams/learning_rate",)
