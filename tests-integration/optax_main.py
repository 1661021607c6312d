"""The transformations of `optax` itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from optax_case import AMBIGUOUS, MIN_DIM, Case, Transformation, adafactor, always, is_matrix, optax


def constructors() -> dict[str, Case]:
    """Constructors of `optax` itself, apart from wrappers."""
    simple: Mapping[str, Callable[[], Transformation]] = {
        "adabelief": lambda: optax.adabelief(1e-2),
        "adadelta": lambda: optax.adadelta(1e-2),
        "adafactor": adafactor,
        "adafactor: momentum": lambda: adafactor(momentum=0.9, dtype_momentum=jnp.bfloat16),
        "adafactor: unfactored": lambda: optax.adafactor(1e-2, factored=False),
        "adafactor: weight decay": lambda: adafactor(weight_decay_rate=1e-3, momentum=0.9),
        "adagrad": lambda: optax.adagrad(1e-2),
        "adam": lambda: optax.adam(1e-2),
        "adam: mu_dtype": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
        "adam: schedule": lambda: optax.adam(optax.linear_schedule(1e-2, 1e-3, 10)),
        "adamax": lambda: optax.adamax(1e-2),
        "adamaxw": lambda: optax.adamaxw(1e-2),
        "adamw": lambda: optax.adamw(1e-2),
        "adamw: mask": lambda: optax.adamw(1e-2, mask=is_matrix),
        "adan": lambda: optax.adan(1e-2),
        "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
        "add_decayed_weights": lambda: optax.add_decayed_weights(1e-3),
        "add_decayed_weights: schedule": lambda: optax.add_decayed_weights(
            optax.constant_schedule(1e-3)
        ),
        "add_noise": lambda: optax.add_noise(0.0, 0.55, key=jax.random.key(0)),
        "amsgrad": lambda: optax.amsgrad(1e-2),
        "apply_every": lambda: optax.apply_every(2),
        "centralize": optax.centralize,
        "clip": lambda: optax.clip(1.0),
        "clip_by_block_rms": lambda: optax.clip_by_block_rms(1.0),
        "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
        "ema": lambda: optax.ema(0.9),
        "ema: dtype": lambda: optax.ema(0.9, accumulator_dtype=jnp.bfloat16),
        "fromage": lambda: optax.fromage(1e-2),
        "identity": optax.identity,
        "keep_params_nonnegative": optax.keep_params_nonnegative,
        "lamb": lambda: optax.lamb(1e-2),
        "lars": lambda: optax.lars(1e-2),
        "lion": lambda: optax.lion(1e-2),
        "nadam": lambda: optax.nadam(1e-2),
        "nadamw": lambda: optax.nadamw(1e-2),
        "noisy_sgd": lambda: optax.noisy_sgd(1e-2, eta=0.0, key=jax.random.key(0)),
        "normalize_by_update_norm": optax.normalize_by_update_norm,
        "novograd": lambda: optax.novograd(1e-2),
        "optimistic_adam": lambda: optax.optimistic_adam(1e-2),
        "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(1e-2),
        "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(1e-2),
        "radam": lambda: optax.radam(1e-2),
        "rmsprop": lambda: optax.rmsprop(1e-2),
        "rmsprop: bias correction": lambda: optax.rmsprop(1e-2, bias_correction=True),
        "rmsprop: centered": lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9),
        "rmsprop: both": lambda: optax.rmsprop(1e-2, centered=True, bias_correction=True),
        "rprop": lambda: optax.rprop(1e-2),
        "scale": lambda: optax.scale(0.1),
        "scale_by_adadelta": optax.scale_by_adadelta,
        "scale_by_adam": optax.scale_by_adam,
        "scale_by_adamax": optax.scale_by_adamax,
        "scale_by_adan": optax.scale_by_adan,
        "scale_by_amsgrad": optax.scale_by_amsgrad,
        "scale_by_belief": optax.scale_by_belief,
        "scale_by_distance_over_gradients": optax.scale_by_distance_over_gradients,
        "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(
            min_dim_size_to_factor=MIN_DIM
        ),
        "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(1e-2),
        "scale_by_lion": optax.scale_by_lion,
        "scale_by_novograd": optax.scale_by_novograd,
        "scale_by_optimistic_gradient": optax.scale_by_optimistic_gradient,
        "scale_by_param_block_norm": optax.scale_by_param_block_norm,
        "scale_by_param_block_rms": optax.scale_by_param_block_rms,
        "scale_by_radam": optax.scale_by_radam,
        "scale_by_rms": optax.scale_by_rms,
        "scale_by_rprop": lambda: optax.scale_by_rprop(1e-2),
        "scale_by_rss": optax.scale_by_rss,
        "scale_by_schedule": lambda: optax.scale_by_schedule(optax.constant_schedule(0.1)),
        "scale_by_sign": optax.scale_by_sign,
        "scale_by_stddev": optax.scale_by_stddev,
        "scale_by_trust_ratio": optax.scale_by_trust_ratio,
        "scale_by_yogi": optax.scale_by_yogi,
        "set_to_zero": optax.set_to_zero,
        "sgd": lambda: optax.sgd(1e-2),
        "sgd: momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
        "sgd: dtype": lambda: optax.sgd(1e-2, momentum=0.9, accumulator_dtype=jnp.bfloat16),
        "sign_sgd": lambda: optax.sign_sgd(1e-2),
        "signum": lambda: optax.signum(1e-2),
        "stateless": lambda: optax.stateless(lambda updates, params: updates),
        "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: u),
        "trace": lambda: optax.trace(0.9),
        "yogi": lambda: optax.yogi(1e-2),
        "zero_nans": optax.zero_nans,
        "snapshot": lambda: optax.snapshot("gradients", lambda updates: updates),
        "measure_with_ema": lambda: optax.measure_with_ema(lambda updates: updates, decay=0.9),
    }
    explicit = {"adaptive_grad_clip": AMBIGUOUS}
    table = {name: always(make, explicit=explicit.get(name, "")) for name, make in simple.items()}
    table["adam: complex"] = always(lambda: optax.adam(1e-2), dtype=jnp.complex64)
    table["chain: complex"] = always(
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9)),
        dtype=jnp.complex64,
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
