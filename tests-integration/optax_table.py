"""Every transformation that Optax exports, by name and variant, and nestings that users write."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Much of what they export is not an explicit export, which mypy asks for.
optax: Any = importlib.import_module("optax")
contrib: Any = importlib.import_module("optax.contrib")
aggregating: Any = importlib.import_module("optax.experimental").aggregating

Params = Any
Transformation = Any

MIN_DIM = 8  # from this size on, everything in the table that can factor does
RANK = 4  # of GaLore

# Reasons not to ask one of the questions of a case; each is of Optax, none of ours.
AMBIGUOUS = "contracts two sharded dimensions: ShardingTypeError on Explicit meshes"
CONCATENATES = "concatenates what is sharded differently: ShardingTypeError on Explicit meshes"
SVD = "has no sharding rule for the SVD: error on Explicit meshes"


@dataclasses.dataclass(frozen=True)
class Case:
    """A transformation, and how it must be treated."""

    make: Callable[[Params], Transformation]
    extras: tuple[str, ...] = ()  # arguments that its `update` needs
    without: tuple[str, ...] = ()  # top-level parameters that it cannot work with
    gradients: Callable[[Params], Params] = lambda gradients: gradients  # what it takes for them
    wrap: Callable[[Params], Params] = lambda params: params  # what it takes for parameters
    fast: Callable[[Params], Params] = lambda params: params  # the parameters in that
    has_oracle: bool = True  # whether values can be traced through its updates
    explicit: str = ""  # why its update does not run on a mesh of `Explicit` axes
    dtype: Any = jnp.float32  # of the parameters
    rtol: float | None = None  # between sharded and unsharded, where the default is too tight
    grows: bool = False  # whether the first update gives the state leaves that it did not have

    def build(self, params: Params) -> Transformation:
        """Makes the transformation for parameters; some that Optax exports are deprecated."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            return optax.with_extra_args_support(self.make(params))


def cases(makers: Mapping[str, Callable[[], Transformation]], **options: Any) -> dict[str, Case]:
    """Cases whose transformations do not depend on the parameters."""

    def case(make: Callable[[], Transformation]) -> Case:
        return Case(lambda _: make(), **options)

    return {name: case(make) for name, make in makers.items()}


def is_matrix(params: Params) -> Params:
    """A mask: matrices are in."""
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


def by_rank(params: Params) -> Params:
    """Labels: matrices, and the rest."""
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "rest", params)


def prefix_tree(value: Callable[[str], Any], params: Params) -> Params:
    """A prefix tree: one value per top-level parameter."""
    return {name: value(name) for name in params}


def per_example(gradients: Params) -> Params:
    return jax.tree.map(lambda g: jnp.stack([g, 0.5 * g]), gradients)


def adafactor(**options: Any) -> Transformation:
    return optax.adafactor(1e-2, min_dim_size_to_factor=MIN_DIM, **options)


def multi_steps(inner: Transformation, **options: Any) -> Transformation:
    return optax.MultiSteps(inner, 2, **options).gradient_transformation()


def by_name(plain: str, of_a_rate: str, module: Any) -> dict[str, Callable[[], Transformation]]:
    """Constructors that need no argument, and those that need a learning rate alone."""
    return {name: getattr(module, name) for name in plain.split()} | {
        name: functools.partial(getattr(module, name), 1e-2) for name in of_a_rate.split()
    }


_PLAIN = (
    "centralize identity keep_params_nonnegative normalize_by_update_norm scale_by_adadelta "
    "scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief "
    "scale_by_distance_over_gradients scale_by_lion scale_by_novograd scale_by_optimistic_gradient "
    "scale_by_param_block_norm scale_by_param_block_rms scale_by_radam scale_by_rms scale_by_rss "
    "scale_by_sign scale_by_stddev scale_by_trust_ratio scale_by_yogi set_to_zero zero_nans"
)
_OF_A_RATE = (
    "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion "
    "nadam nadamw novograd optimistic_adam optimistic_adam_v2 optimistic_gradient_descent radam "
    "rmsprop rprop scale_by_learning_rate scale_by_rprop sgd sign_sgd signum yogi"
)


def constructors() -> dict[str, Case]:
    """Constructors of `optax` itself, apart from wrappers."""
    simple: dict[str, Callable[[], Transformation]] = {
        "adafactor": adafactor,
        "adafactor: momentum": lambda: adafactor(momentum=0.9, dtype_momentum=jnp.bfloat16),
        "adafactor: unfactored": lambda: optax.adafactor(1e-2, factored=False),
        "adafactor: weight decay": lambda: adafactor(weight_decay_rate=1e-3, momentum=0.9),
        "adam: mu_dtype": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
        "adam: schedule": lambda: optax.adam(optax.linear_schedule(1e-2, 1e-3, 10)),
        "adamw: mask": lambda: optax.adamw(1e-2, mask=is_matrix),
        "add_decayed_weights": lambda: optax.add_decayed_weights(1e-3),
        "add_noise": lambda: optax.add_noise(0.0, 0.55, key=jax.random.key(0)),
        "apply_every": lambda: optax.apply_every(2),
        "clip": lambda: optax.clip(1.0),
        "clip_by_block_rms": lambda: optax.clip_by_block_rms(1.0),
        "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
        "ema": lambda: optax.ema(0.9),
        "ema: dtype": lambda: optax.ema(0.9, accumulator_dtype=jnp.bfloat16),
        "noisy_sgd": lambda: optax.noisy_sgd(1e-2, eta=0.0, key=jax.random.key(0)),
        "rmsprop: bias correction": lambda: optax.rmsprop(1e-2, bias_correction=True),
        "rmsprop: centered": lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9),
        "scale": lambda: optax.scale(0.1),
        "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(
            min_dim_size_to_factor=MIN_DIM
        ),
        "scale_by_schedule": lambda: optax.scale_by_schedule(optax.constant_schedule(0.1)),
        "sgd: momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
        "sgd: dtype": lambda: optax.sgd(1e-2, momentum=0.9, accumulator_dtype=jnp.bfloat16),
        "stateless": lambda: optax.stateless(lambda updates, params: updates),
        "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: u),
        "trace": lambda: optax.trace(0.9),
        "snapshot": lambda: optax.snapshot("gradients", lambda updates: updates),
        "measure_with_ema": lambda: optax.measure_with_ema(lambda updates: updates, decay=0.9),
    }
    table = cases(simple | by_name(_PLAIN, _OF_A_RATE, optax))
    table |= cases(
        {
            "adam: complex": lambda: optax.adam(1e-2),
            "chain: complex": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9)),
        },
        dtype=jnp.complex64,
    )
    # The minimum over no axes at all, the maximum over no elements.
    sm3 = {"sm3": lambda: optax.sm3(1e-2), "scale_by_sm3": optax.scale_by_sm3}
    table |= cases(sm3, without=("scalar", "empty"))
    polyak = {"polyak_sgd": optax.polyak_sgd, "scale_by_polyak": optax.scale_by_polyak}
    table |= cases(polyak, extras=("value",))
    contracting = {
        "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
        "scale_by_lbfgs": lambda: optax.scale_by_lbfgs(3),
        "lbfgs: no search": lambda: optax.lbfgs(1e-1, memory_size=2, linesearch=None),
    }
    table |= cases(contracting, explicit=AMBIGUOUS)
    searches = {
        "lbfgs": lambda: optax.lbfgs(memory_size=4),
        "scale_by_backtracking_linesearch": lambda: optax.scale_by_backtracking_linesearch(
            3, store_grad=True
        ),
        "scale_by_backtracking_linesearch: no gradient": (
            lambda: optax.scale_by_backtracking_linesearch(3)
        ),
        "scale_by_zoom_linesearch": lambda: optax.scale_by_zoom_linesearch(3),
    }
    extras = ("value", "grad", "value_fn")
    table |= cases(searches, extras=extras, explicit=AMBIGUOUS, rtol=1e-3)
    # A measurement appears in the state with the first update; before, there is nothing to shard.
    monitor = {"monitor": lambda: optax.monitor({"norm": optax.tree.norm})}
    return table | cases(monitor, grows=True)


def wrappers() -> dict[str, Case]:
    """Wrappers of `optax` itself."""
    simple = {
        "apply_if_finite": lambda: optax.apply_if_finite(adafactor(), 3),
        "chain": lambda: optax.chain(
            optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(-1e-2)
        ),
        "conditionally_mask": lambda: optax.conditionally_mask(
            optax.adam(1e-2), lambda step, **_: step != 1
        ),
        "conditionally_transform": lambda: optax.conditionally_transform(
            adafactor(), lambda step, **_: step != 1
        ),
        "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
            optax.linear_schedule(1e-2, 1e-3, 10)
        ),
        "inject_hyperparams: adafactor": lambda: optax.inject_hyperparams(
            optax.adafactor, static_args=("min_dim_size_to_factor", "dtype_momentum", "factored")
        )(learning_rate=1e-2, min_dim_size_to_factor=MIN_DIM),
        "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(1e-2),
        "masked": lambda: optax.masked(optax.adam(1e-2), is_matrix),
        "multi_transform": lambda: optax.multi_transform(
            {"matrix": adafactor(), "rest": optax.adam(1e-2)}, by_rank
        ),
        "named_chain": lambda: optax.named_chain(
            ("clip", optax.clip(1e3)), ("factored", adafactor()), ("adam", optax.adam(1e-2))
        ),
        "partition: integers": lambda: optax.partition(
            {0: optax.adam(1e-2), 1: optax.set_to_zero()},
            lambda params: jax.tree.map(lambda leaf: int(leaf.ndim != 2), params),
        ),
        "with_extra_args_support": lambda: optax.with_extra_args_support(optax.trace(0.9)),
        "MultiSteps": lambda: multi_steps(optax.adamw(1e-2)),
        "MultiSteps: not finite": lambda: multi_steps(
            optax.adam(1e-2), should_skip_update_fn=optax.skip_not_finite
        ),
    }
    table = cases(simple)
    table |= cases({"flatten": lambda: optax.flatten(optax.adam(1e-2))}, explicit=CONCATENATES)
    table["freeze"] = Case(lambda params: optax.freeze(is_matrix(params)))
    table["masked: leaves"] = Case(
        lambda params: optax.masked(adafactor(momentum=0.9), is_matrix(params))
    )
    table["partition"] = Case(
        lambda params: optax.partition(
            {"matrix": optax.lion(1e-2), "rest": adafactor()}, by_rank(params)
        )
    )
    table["partition: prefix"] = Case(
        lambda params: optax.partition(
            {"a": adafactor(momentum=0.9), "b": optax.freeze(True)},
            prefix_tree(lambda name: "b" if name == "square" else "a", params),
        )
    )
    table["partition: nested"] = Case(
        lambda params: multi_steps(
            optax.chain(
                optax.clip_by_global_norm(1.0),
                optax.partition(
                    {
                        "matrix": optax.inject_hyperparams(optax.adam)(1e-2),
                        "rest": optax.apply_if_finite(adafactor(), 2),
                    },
                    by_rank,
                ),
            )
        )
    )
    table["selective_transform"] = Case(
        lambda p: optax.selective_transform(optax.adam(1e-2), freeze_mask=is_matrix(p))
    )
    table["lookahead"] = Case(
        lambda _: optax.lookahead(adafactor(momentum=0.9), 2, 0.5),
        wrap=optax.LookaheadParams.init_synced,
        fast=lambda params: params.fast,
    )
    return table


def contrib_constructors() -> dict[str, Case]:
    """Constructors of `optax.contrib`."""
    plain = (
        "cocob dog dowg normalize scale_by_acprop scale_by_ademamix scale_by_adopt scale_by_cocob "
        "scale_by_simplified_ademamix schedule_free_adamw schedule_free_sgd"
    )
    of_a_rate = "acprop ademamix adopt madgrad scale_by_madgrad simplified_ademamix"
    simple: dict[str, Callable[[], Transformation]] = {
        "schedule_free": lambda: contrib.schedule_free(optax.adam(1e-2), 1e-2),
        "sam": lambda: contrib.sam(optax.adam(1e-2), contrib.normalize(), sync_period=2),
        "sam: factored": lambda: contrib.sam(adafactor(), optax.sgd(1e-2, 0.9), sync_period=2),
        "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
            adafactor(momentum=0.9)
        ),
    }
    table = cases(simple | by_name(plain, of_a_rate, contrib))
    table |= cases(
        {"split_real_and_imaginary: complex": simple["split_real_and_imaginary"]},
        dtype=jnp.complex64,
    )
    ambiguous: dict[str, Callable[[], Transformation]] = {
        "dadapt_adamw": contrib.dadapt_adamw,
        "prodigy": contrib.prodigy,
        "mechanize": lambda: contrib.mechanize(optax.adam(1e-2)),
    }
    table |= cases(ambiguous, explicit=AMBIGUOUS)
    of_a_value = {"momo": contrib.momo, "momo_adam": contrib.momo_adam}
    table |= cases(of_a_value, extras=("value",), explicit=AMBIGUOUS)
    table |= cases({"reduce_on_plateau": contrib.reduce_on_plateau}, extras=("value",))
    inner = optax.adam(1e-2), optax.sgd(1e-2, 0.9)
    opaque = {"sync_period": 2, "opaque_mode": True, "reset_state": False}
    table |= cases({"sam: opaque": lambda: contrib.sam(*inner, **opaque)}, extras=("grad_fn",))
    muon: dict[str, Any] = {"without": ("empty",), "explicit": AMBIGUOUS}
    table |= cases({"muon": lambda: contrib.muon(1e-2)}, **muon)
    numbers = contrib.MuonDimensionNumbers
    table["muon: dimensions"] = Case(
        lambda params: contrib.muon(
            1e-2, muon_weight_dimension_numbers=_matrices_as(numbers, params), consistent_rms=0.2
        ),
        **muon,
    )
    # Its default for the dimension numbers fails on every tree that is not one matrix.
    table["scale_by_muon"] = Case(
        lambda params: contrib.scale_by_muon(
            weight_dimension_numbers=jax.tree.map(lambda _: numbers(), params)
        ),
        without=("scalar", "bias", "conv", "layers", "empty"),
        explicit=AMBIGUOUS,
    )
    hessians = {
        "sophia": lambda: contrib.sophia(1e-2, update_interval=1),
        "hutchinson_estimator_diag_hessian": contrib.hutchinson_estimator_diag_hessian,
    }
    table |= cases(hessians, extras=("obj_fn",))
    private = {
        "differentially_private_aggregate": lambda: contrib.differentially_private_aggregate(
            1.0, 0.0, key=jax.random.key(0)
        ),
        "dpsgd": lambda: contrib.dpsgd(1e-2, 1.0, 0.0, 0, momentum=0.9),
    }
    table |= cases(private, gradients=per_example)
    # Singular vectors have no sign of their own, and none to show where a gradient is of rank
    # one; sharded sums come out a little different, which they magnify. opt-partition's own tests
    # have the dimensions of their projections.
    galore = {
        "galore": lambda: contrib.galore(1e-2, rank=RANK),
        "scale_by_galore": lambda: contrib.scale_by_galore(rank=RANK),
    }
    table |= cases(galore, has_oracle=False, explicit=SVD, rtol=1e-2, without=("empty", "row"))
    return {f"contrib.{name}": case for name, case in table.items()}


def aggregators() -> dict[str, Case]:
    """Constructors of `optax.experimental.aggregating`."""
    of_examples: dict[str, Callable[[], Transformation]] = {
        "average_per_element_updates": aggregating.average_per_element_updates,
        "average_incrementally_updates": lambda: aggregating.average_incrementally_updates(0, 2),
        "get_per_element_mean_and_sum_sq_diff_grads": lambda: _first(
            aggregating.get_per_element_mean_and_sum_sq_diff_grads(0, 2)
        ),
        "process": lambda: aggregating.process(
            optax.identity(), aggregating.average_per_element_updates(), optax.adam(1e-2)
        ),
        "add_mean_variance_to_opt": lambda: aggregating.add_mean_variance_to_opt(adafactor()),
    }
    table = cases(of_examples, gradients=per_example)
    table |= cases({"accumulate_avg_updates": lambda: aggregating.accumulate_avg_updates(2)})
    track = "track_per_element_mean_and_variance_with_ema"
    table |= cases(
        {track: getattr(aggregating, track)}, extras=("sum_sq_diff_grads", "sample_size")
    )
    return {f"experimental.aggregating.{name}": case for name, case in table.items()}


def _first(aggregator: Transformation) -> Transformation:
    """An aggregator without what it returns beside the updates."""

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        (updates, _), state = aggregator.update(updates, state, params)
        return updates, state

    return optax.GradientTransformation(aggregator.init, update)


def _matrices_as(factory: Callable[..., Any], params: Params) -> Params:
    """Which dimensions of each parameter Muon or GaLore treats as a matrix."""
    return jax.tree.map(
        lambda leaf: factory((leaf.ndim - 2,), (leaf.ndim - 1,)) if leaf.ndim == 3 else None, params
    )


class Momentum(NamedTuple):
    """State of a user's transformation, and its fields do not look like anything of Optax."""

    steps: Any
    velocity: Any
    row_scale: Any


def momentum() -> Transformation:
    """A user's transformation: a velocity, and a scale per row of a matrix."""

    def row(leaf: Any) -> Any:
        return jnp.sum(leaf, axis=-1) if leaf.ndim == 2 else jnp.zeros((), leaf.dtype)

    def init(params: Params) -> Any:
        velocity = jax.tree.map(jnp.zeros_like, params)
        return Momentum(
            steps=jnp.zeros((), jnp.int32), velocity=velocity, row_scale=jax.tree.map(row, velocity)
        )

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        velocity = jax.tree.map(lambda v, u: 0.9 * v + u, state.velocity, updates)
        rows = jax.tree.map(lambda r, u: r + row(u), state.row_scale, updates)
        return velocity, Momentum(steps=state.steps + 1, velocity=velocity, row_scale=rows)

    return optax.GradientTransformation(init, update)


def list_of_leaves() -> Transformation:
    """A user's transformation whose state is a list, one entry per parameter leaf."""

    def init(params: Params) -> Any:
        return [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(params)]

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        return updates, [s + u for s, u in zip(state, jax.tree.leaves(updates), strict=True)]

    return optax.GradientTransformation(init, update)


def of_users() -> dict[str, Case]:
    """What Optax does not have, but its users do: other kinds of states."""
    return cases(
        {
            "user: in a chain": lambda: multi_steps(optax.chain(adafactor(), momentum())),
            "user: list of leaves": list_of_leaves,
        }
    )


TABLE = constructors() | wrappers() | contrib_constructors() | aggregators() | of_users()


def exported() -> dict[str, str]:
    """Every public constructor of a transformation: its name, and the annotated result, if any."""
    modules = {
        "": optax,
        "contrib.": contrib,
        "transforms.": importlib.import_module("optax.transforms"),
        "experimental.aggregating.": aggregating,
    }
    found: dict[int, tuple[str, str]] = {}
    for prefix, module in modules.items():
        for name, value in sorted(vars(module).items()):
            function = value.func if isinstance(value, functools.partial) else value
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            if not function.__module__.startswith("optax."):
                continue
            returns = inspect.signature(value).return_annotation
            annotation = "" if returns is inspect.Signature.empty else str(returns)
            if not annotation or re.search("GradientTransformation|Aggregator", annotation):
                found.setdefault(id(value), (prefix + name, annotation))
    return dict(found.values())


# Public functions without an annotation that make no transformation.
NOT_CONSTRUCTORS = frozenset(
    {
        "bias_correction",
        "contrib.schedule_free_eval_params",
        "matrix_inverse_pth_root",
        "sigmoid_binary_cross_entropy",
        "update_infinity_moment",
        "update_moment",
        "update_moment_per_elem_norm",
    }
)
