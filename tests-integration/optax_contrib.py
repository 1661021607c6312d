"""The transformations of `optax.contrib` and of `optax.experimental`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from optax_case import (
    AMBIGUOUS,
    RANK,
    SVD,
    Case,
    Params,
    Transformation,
    adafactor,
    aggregating,
    always,
    contrib,
    optax,
    per_example,
)


def constructors() -> dict[str, Case]:
    """Constructors of `optax.contrib` and of `optax.experimental`."""
    plain = (
        "cocob dog dowg normalize scale_by_acprop scale_by_ademamix scale_by_adopt scale_by_cocob "
        "scale_by_simplified_ademamix schedule_free_adamw schedule_free_sgd"
    )
    of_a_rate = "acprop ademamix adopt madgrad scale_by_madgrad simplified_ademamix"
    there = vars(contrib)
    simple: dict[str, Callable[[], Transformation]] = {
        "schedule_free": lambda: contrib.schedule_free(optax.adam(1e-2), 1e-2),
        "schedule_free: factored": lambda: contrib.schedule_free(adafactor(), 1e-2),
        "sam": lambda: contrib.sam(optax.adam(1e-2), contrib.normalize(), sync_period=2),
        "sam: factored": lambda: contrib.sam(adafactor(), optax.sgd(1e-2, 0.9), sync_period=2),
    }
    simple |= {name: there[name] for name in plain.split() if name in there}
    simple |= {
        name: functools.partial(there[name], 1e-2) for name in of_a_rate.split() if name in there
    }
    table = {f"contrib.{name}": always(make) for name, make in simple.items()}
    ambiguous: Mapping[str, Callable[[], Transformation]] = {
        "dadapt_adamw": contrib.dadapt_adamw,
        "prodigy": contrib.prodigy,
        "mechanize": lambda: contrib.mechanize(optax.adam(1e-2)),
        "mechanize: factored": lambda: contrib.mechanize(adafactor(momentum=0.9)),
    }
    for name, make in ambiguous.items():
        table[f"contrib.{name}"] = always(make, explicit=AMBIGUOUS)
    table["contrib.muon"] = always(
        lambda: contrib.muon(1e-2), without=("empty",), explicit=AMBIGUOUS
    )
    for name in ("momo", "momo_adam"):
        make = getattr(contrib, name)
        table[f"contrib.{name}"] = always(make, extras=("value",), explicit=AMBIGUOUS)
    table["contrib.reduce_on_plateau"] = always(contrib.reduce_on_plateau, extras=("value",))
    table["contrib.sam: opaque"] = always(
        lambda: contrib.sam(
            optax.adam(1e-2),
            optax.sgd(1e-2, 0.9),
            sync_period=2,
            opaque_mode=True,
            reset_state=False,
        ),
        extras=("grad_fn",),
    )
    for suffix, dtype in (("", jnp.float32), (": complex", jnp.complex64)):
        table["contrib.split_real_and_imaginary" + suffix] = always(
            lambda: contrib.split_real_and_imaginary(adafactor(momentum=0.9)), dtype=dtype
        )
    dimensions = {"consistent_rms": 0.2} if "consistent_rms" in _arguments(contrib.muon) else {}
    if "muon_weight_dimension_numbers" in _arguments(contrib.muon):
        numbers = contrib.MuonDimensionNumbers
        table["contrib.muon: dimensions"] = Case(
            lambda params: contrib.muon(
                1e-2, muon_weight_dimension_numbers=_matrices_as(numbers, params), **dimensions
            ),
            without=("empty",),
            explicit=AMBIGUOUS,
        )
        # Its default for the dimension numbers fails on every tree that is not one matrix.
        table["contrib.scale_by_muon"] = Case(
            lambda params: contrib.scale_by_muon(
                weight_dimension_numbers=jax.tree.map(lambda _: numbers(), params)
            ),
            without=("scalar", "bias", "conv", "layers", "empty"),
            explicit=AMBIGUOUS,
        )
    table["contrib.sophia"] = always(
        lambda: contrib.sophia(1e-2, update_interval=1), extras=("obj_fn",)
    )
    table["contrib.hutchinson_estimator_diag_hessian"] = always(
        contrib.hutchinson_estimator_diag_hessian, extras=("obj_fn",)
    )
    examples = {"gradients": per_example}
    table["contrib.differentially_private_aggregate"] = always(
        lambda: contrib.differentially_private_aggregate(1.0, 0.0, key=jax.random.key(0)),
        **examples,
    )
    table["contrib.dpsgd"] = always(
        lambda: contrib.dpsgd(1e-2, 1.0, 0.0, 0, momentum=0.9), **examples
    )
    if hasattr(contrib, "galore"):
        # Singular vectors have no sign of their own, and none to show where a gradient is of rank
        # one; sharded sums come out a little different, which they magnify.
        galore = {"oracle": "shifts", "explicit": SVD, "rtol": 1e-2, "without": ("empty", "row")}
        table["contrib.galore"] = always(lambda: contrib.galore(1e-2, rank=RANK), **galore)
        table["contrib.galore: momentum"] = always(
            lambda: contrib.galore(1e-2, rank=RANK, base_optimizer=optax.trace(0.9)), **galore
        )
        table["contrib.scale_by_galore"] = always(
            lambda: contrib.scale_by_galore(rank=RANK), **galore
        )
    if aggregating is None:
        return table
    prefix = "experimental.aggregating."
    table[prefix + "accumulate_avg_updates"] = always(lambda: aggregating.accumulate_avg_updates(2))
    table[prefix + "average_per_element_updates"] = always(
        aggregating.average_per_element_updates, **examples
    )
    table[prefix + "average_incrementally_updates"] = always(
        lambda: aggregating.average_incrementally_updates(0, 2), **examples
    )
    table[prefix + "get_per_element_mean_and_sum_sq_diff_grads"] = always(
        lambda: _first(aggregating.get_per_element_mean_and_sum_sq_diff_grads(0, 2)), **examples
    )
    table[prefix + "track_per_element_mean_and_variance_with_ema"] = always(
        aggregating.track_per_element_mean_and_variance_with_ema,
        extras=("sum_sq_diff_grads", "sample_size"),
    )
    table[prefix + "process"] = always(
        lambda: aggregating.process(
            optax.identity(), aggregating.average_per_element_updates(), optax.adam(1e-2)
        ),
        **examples,
    )
    table[prefix + "add_mean_variance_to_opt"] = always(
        lambda: aggregating.add_mean_variance_to_opt(adafactor()), **examples
    )
    return table


def _first(aggregator: Transformation) -> Transformation:
    """An aggregator without what it returns beside the updates."""

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        (updates, _), state = aggregator.update(updates, state, params)
        return updates, state

    return optax.GradientTransformation(aggregator.init, update)


def _arguments(function: Callable[..., Any]) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = inspect.signature(function).parameters
    return parameters


def _matrices_as(factory: Callable[..., Any], params: Params) -> Params:
    """Which dimensions of each parameter Muon or GaLore treats as a matrix."""
    return jax.tree.map(
        lambda leaf: factory((leaf.ndim - 2,), (leaf.ndim - 1,)) if leaf.ndim == 3 else None, params
    )
