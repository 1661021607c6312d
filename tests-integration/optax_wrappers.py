"""The wrappers of `optax` itself, and nestings of them."""

from __future__ import annotations

import jax
from optax_case import (
    CONCATENATES,
    MIN_DIM,
    Case,
    adafactor,
    always,
    by_rank,
    is_matrix,
    multi_steps,
    optax,
    prefix_tree,
)


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
