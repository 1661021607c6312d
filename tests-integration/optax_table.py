"""Every transformation that the installed Optax exports, and the nestings that people write.

`TABLE` maps a name to a `Case`. Where a name begins with that of a constructor, as Optax exports
it (`adamw`, `contrib.muon`), a colon and a variant may follow; other names begin with `user`.
Cases whose constructors this Optax does not have yet are left out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax_contrib
import user_transformations
from optax_case import (
    AMBIGUOUS,
    CONCATENATES,
    MIN_DIM,
    Case,
    Transformation,
    adafactor,
    aggregating,
    always,
    by_rank,
    contrib,
    is_matrix,
    multi_steps,
    optax,
    prefix_tree,
)

transforms: Any = importlib.import_module("optax.transforms")


# Constructors that need no argument, and those that need a learning rate alone.
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
        "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
        "add_decayed_weights": lambda: optax.add_decayed_weights(1e-3),
        "add_decayed_weights: schedule": lambda: optax.add_decayed_weights(
            optax.constant_schedule(1e-3)
        ),
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
        "rmsprop: both": lambda: optax.rmsprop(1e-2, centered=True, bias_correction=True),
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
    there = vars(optax)
    simple |= {name: there[name] for name in _PLAIN.split() if name in there}
    simple |= {
        name: functools.partial(there[name], 1e-2) for name in _OF_A_RATE.split() if name in there
    }
    explicit = {"adaptive_grad_clip": AMBIGUOUS}
    table = {name: always(make, explicit=explicit.get(name, "")) for name, make in simple.items()}
    table["adam: complex"] = always(lambda: optax.adam(1e-2), dtype=jnp.complex64)
    table["chain: complex"] = always(
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9)), dtype=jnp.complex64
    )
    # The minimum over no axes at all, the maximum over no elements.
    for name, make in {"sm3": lambda: optax.sm3(1e-2), "scale_by_sm3": optax.scale_by_sm3}.items():
        table[name] = always(make, without=("scalar", "empty"))
    for name in ("polyak_sgd", "scale_by_polyak"):
        table[name] = always(getattr(optax, name), extras=("value",))
    searches = ("value", "grad", "value_fn")
    search = {"extras": searches, "explicit": AMBIGUOUS, "rtol": 1e-3}
    table["scale_by_lbfgs"] = always(lambda: optax.scale_by_lbfgs(3), explicit=AMBIGUOUS)
    table["lbfgs: no search"] = always(
        lambda: optax.lbfgs(1e-1, memory_size=2, linesearch=None), explicit=AMBIGUOUS
    )
    table["lbfgs"] = always(lambda: optax.lbfgs(memory_size=4), **search)
    table["scale_by_backtracking_linesearch"] = always(
        lambda: optax.scale_by_backtracking_linesearch(3, store_grad=True), **search
    )
    table["scale_by_backtracking_linesearch: no gradient"] = always(
        lambda: optax.scale_by_backtracking_linesearch(3), **search
    )
    table["scale_by_zoom_linesearch"] = always(lambda: optax.scale_by_zoom_linesearch(3), **search)
    # A measurement appears in the state with the first update; before, there is nothing to shard.
    table["monitor"] = always(lambda: optax.monitor({"norm": optax.tree.norm}), grows=True)
    return table


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
        "MultiSteps: factored": lambda: multi_steps(adafactor()),
        "MultiSteps: not finite": lambda: multi_steps(
            optax.adam(1e-2), should_skip_update_fn=optax.skip_not_finite
        ),
    }
    table = {name: always(make) for name, make in simple.items()}
    table["flatten"] = always(lambda: optax.flatten(optax.adam(1e-2)), explicit=CONCATENATES)
    table["freeze"] = Case(lambda params: optax.freeze(is_matrix(params)))
    table["masked: leaves"] = Case(
        lambda params: optax.masked(adafactor(momentum=0.9), is_matrix(params))
    )
    table["masked: prefix"] = Case(
        lambda p: optax.masked(adafactor(), prefix_tree(lambda name: name != "layers", p))
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
    table["lookahead"] = always(
        lambda: optax.lookahead(adafactor(momentum=0.9), 2, 0.5),
        wrap=optax.LookaheadParams.init_synced,
        fast=lambda params: params.fast,
    )
    return table


def exported() -> dict[str, str]:
    """Every public constructor of a transformation: its name, and the annotated result.

    What has no annotation is in it, too.
    """
    modules: dict[str, ModuleType] = {"": optax, "contrib.": contrib, "transforms.": transforms}
    if aggregating is not None:
        modules["experimental.aggregating."] = aggregating
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


def _table() -> dict[str, Case]:
    of_contrib, of_users = optax_contrib.constructors(), user_transformations.transformations()
    everything = constructors() | wrappers() | of_contrib | of_users
    return {name: case for name, case in everything.items() if _is_there(name)}


def _is_there(name: str) -> bool:
    """Whether the installed Optax has the constructor that `name` begins with."""
    value: Any = optax
    constructor = name.partition(":")[0]
    if constructor == "user":
        return True
    if constructor.startswith("experimental."):
        return aggregating is not None and hasattr(aggregating, constructor.rpartition(".")[2])
    for part in constructor.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


TABLE = _table()
