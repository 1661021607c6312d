"""The state fields of Optax's transformations, and the settings they hang on.

`docs/state-meaning.md` shows the table, and the harm of ignoring such a change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from opt_core import Bearing

Shape: TypeAlias = tuple[int, ...]
Dims: TypeAlias = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known about one transformation."""

    roles: Mapping[str, Any]  # the role of each field of its state
    # the effect of changing a setting; settings not listed may change freely
    bearing: Mapping[str, Bearing]
    reshapes: bool = False  # whether nested transformations see parameters of other shapes


_REFUSED: Final = Bearing("refused")
_INITIAL: Final = Bearing("initial")


def _known(
    roles: str = "", bearing: Mapping[str, Bearing] | None = None, *, reshapes: bool = False
) -> Known:
    """Parses `role: field field, role: field`."""
    by_field: dict[str, str] = {}
    for part in filter(None, roles.split(", ")):
        role, fields = part.split(": ")
        by_field |= dict.fromkeys(fields.split(), role)
    return Known(by_field, MappingProxyType(dict(bearing or {})), reshapes)


VARIANTS: Final = MappingProxyType({"amsgrad": "adam"})
"""Variants: the base's state and recurrences, plus further fields.

A variant is described as its base, with a boolean setting named after the variant.
"""

_ADAM = "moment: mu, second_moment: nu, count: count"


def _window(field: str, *settings: str) -> dict[str, Bearing]:
    return dict.fromkeys(settings, Bearing("window", (field,)))


KNOWN: Final[Mapping[str, Known]] = MappingProxyType(
    {
        # Moments.
        "adam": _known(_ADAM),
        "adamax": _known(_ADAM),
        "belief": _known(_ADAM),
        "yogi": _known(_ADAM, {"initial_accumulator_value": _INITIAL}),
        "radam": _known(_ADAM),
        "novograd": _known(_ADAM),
        "acprop": _known(_ADAM),
        "adopt": _known(_ADAM),
        "amsgrad": _known("moment: mu, second_moment: nu nu_max, count: count"),
        "adan": _known("moment: m v, second_moment: n, other: g, count: t"),
        "ademamix": _known(
            "moment: m1 m2, second_moment: nu, count: count, schedule_count: count_m2"
        ),
        "simplified_ademamix": _known("moment: m, second_moment: n, count: t"),
        "lion": _known("moment: mu, count: count"),
        "trace": _known("moment: trace"),
        "ema": _known("moment: ema, count: count"),
        "rms": _known(
            "second_moment: nu, count: count",
            {"bias_correction": _REFUSED, "initial_scale": _INITIAL},
        ),
        "stddev": _known(
            "moment: mu, second_moment: nu, count: count",
            {"bias_correction": _REFUSED, "initial_scale": _INITIAL},
        ),
        "rss": _known("second_moment: sum_of_squares", {"initial_accumulator_value": _INITIAL}),
        "adadelta": _known("second_moment: e_g e_x"),
        "factored_rms": _known(
            "factored: v_row v_col, second_moment: v, count: count",
            {"step_offset": _REFUSED},
        ),
        "sm3": _known("factored: mu, moment: nu"),
        "rprop": _known(
            "other: step_sizes prev_updates",
            dict.fromkeys(("learning_rate", "max_step_size", "min_step_size"), _INITIAL),
        ),
        "optimistic_gradient": _known("other: is_initial_step previous_gradient"),
        "muon": _known("moment: mu, count: count, other: ns_coeffs", {"ns_coeffs": _REFUSED}),
        "sophia": _known("moment: mu, second_moment: nu, count: count"),
        "hutchinson_estimator_diag_hessian": _known("key: key"),
        "galore": _known(
            "count: count, other: projector",
            {"weight_dimension_numbers": _REFUSED},
            reshapes=True,
        ),
        # Estimated rates and copies of parameters.
        "cocob": _known(
            "params_copy: init_particles, moment: cumulative_gradients, "
            "other: scale subgradients reward",
            {"alpha": _REFUSED, "eps": _INITIAL},
        ),
        "distance_over_gradients": _known(
            "params_copy: init_params, other: max_dist grad_sum_of_squares"
        ),
        "dog": _known(
            "params_copy: init_params, statistic: max_dist sum_sq_norm_grads, other: is_init_step"
        ),
        "dowg": _known("params_copy: init_params, statistic: weighted_sq_norm_grads estim_sq_dist"),
        "madgrad": _known("count: count, second_moment: grad_sum_sq, moment: s, params_copy: x0"),
        "dadapt_adamw": _known(
            "moment: exp_avg grad_sum, second_moment: exp_avg_sq, count: count, "
            "statistic: estim_lr numerator_weighted",
            {"betas": _REFUSED, "estim_lr0": _INITIAL},
        ),
        "prodigy": _known(
            "moment: exp_avg grad_sum, second_moment: exp_avg_sq, params_copy: params0, "
            "count: count, statistic: estim_lr numerator_weighted",
            {"estim_lr0": _REFUSED},
        ),
        "momo": _known(
            "moment: exp_avg, count: count, statistic: gamma, other: barf lb",
            {"lower_bound": _REFUSED},
        ),
        "momo_adam": _known(
            "moment: exp_avg, second_moment: exp_avg_sq, count: count, statistic: gamma, "
            "other: barf lb",
            {"lower_bound": _REFUSED},
        ),
        "mechanize": _known("params_copy: x0, count: count, statistic: r m v s"),
        "schedule_free": _known(
            "params_copy: z, schedule_count: step_count, other: b1 weight_sum max_lr",
            {"b1": _REFUSED, "weight_lr_power": _REFUSED},
        ),
        "lookahead": _known("count: steps_since_sync"),
        "sam": _known(
            "count: steps_since_sync, params_copy: cache",
            _window("steps_since_sync", "sync_period"),
        ),
        # Line searches.
        "lbfgs": _known(
            "params_copy: params diff_params_memory, other: updates diff_updates_memory, "
            "statistic: weights_memory, count: count"
        ),
        "backtracking_linesearch": _known("other: learning_rate value grad info"),
        "zoom_linesearch": _known("other: learning_rate value grad info"),
        # Windows.
        "multi_steps": _known(
            "count: mini_step gradient_step, accumulator: acc_grads, other: skip_state",
            _window("mini_step", "every_k_schedule", "use_grad_mean"),
        ),
        "apply_every": _known(
            "count: count, accumulator: grad_acc", {"k": Bearing("window", ("count",), "k")}
        ),
        "accumulate_avg_updates": _known(
            "count: micro_step, accumulator: avg_grad, other: ready",
            _window("micro_step", "accumulation_steps"),
        ),
        "get_per_element_mean_and_sum_sq_diff_grads": _known(
            "count: micro_step, accumulator: mean_grads sum_sq_diff_grads, other: ready",
            _window("micro_step", "accumulation_steps"),
        ),
        "track_per_element_mean_and_variance_with_ema": _known(
            "count: count, moment: mean_grads_ema, second_moment: variance_grads_ema, "
            "other: ema_decay",
            {"ema_decay": _REFUSED},
        ),
        "reduce_on_plateau": _known(
            "count: plateau_count cooldown_count count, other: scale best_value avg_value",
            {"accumulation_size": _REFUSED, "patience": _REFUSED},
        ),
        # Schedules and conditions.
        "schedule": _known("schedule_count: count"),
        "add_decayed_weights": _known("schedule_count: count"),
        "conditionally_transform": _known("schedule_count: step"),
        "conditionally_mask": _known("schedule_count: step"),
        "apply_if_finite": _known("count: notfinite_count total_notfinite, other: last_finite"),
        "inject_hyperparams": _known(
            "schedule_count: count, other: hyperparams hyperparams_states"
        ),
        "zero_nans": _known("other: found_nan"),
        "snapshot": _known("other: measurement"),
        "monitor": _known("other: measurements"),
        # Random numbers.
        "add_noise": _known("count: count, key: rng_key"),
        "differentially_private_aggregate": _known("key: rng_key"),
        # They change the shapes that nested transformations see.
        "flatten": _known(reshapes=True),
        "split_real_and_imaginary": _known(reshapes=True),
        # Stateless.
        **dict.fromkeys(
            (
                *("adaptive_grad_clip", "average_per_element_updates", "centralize", "clip"),
                *("clip_by_block_rms", "clip_by_global_norm", "keep_params_nonnegative"),
                *("normalize", "normalize_by_update_norm", "param_block_norm"),
                *("param_block_rms", "polyak", "scale", "shape"),
                *("set_to_zero", "sign", "stateless", "stateless_with_tree_map", "trust_ratio"),
            ),
            _known(),
        ),
    }
)


PASS_ON: Final = frozenset(
    {
        *("adaptive_grad_clip", "clip", "clip_by_block_rms", "clip_by_global_norm"),
        *("accumulate_avg_updates", "apply_if_finite", "average_per_element_updates"),
        *("flatten", "inject_hyperparams", "monitor", "multi_steps"),
        *("get_per_element_mean_and_sum_sq_diff_grads", "shape", "snapshot"),
        *("split_real_and_imaginary", "track_per_element_mean_and_variance_with_ema"),
        *("zero_nans",),
    }
)
"""Transformations that at most clip, average over a window or hold back updates."""
