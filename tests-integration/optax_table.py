"""Every transformation that the installed Optax exports, and the nestings that people write.

`TABLE` maps a name to a `Case`. Where a name begins with that of a constructor, as Optax exports
it (`adamw`, `contrib.muon`), a colon and a variant may follow; other names begin with `user`.
Cases whose constructors this Optax does not have yet are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Much of what they export is not an explicit export, which mypy asks for.
optax: Any = importlib.import_module("optax")
contrib: Any = importlib.import_module("optax.contrib")
transforms: Any = importlib.import_module("optax.transforms")
try:
    aggregating: Any = importlib.import_module("optax.experimental").aggregating
except ImportError:  # Optax < 0.2.8
    aggregating = None

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
    """A transformation, and how it must be treated.

    Attributes:
      make: from parameters to the transformation.
      extras: the extra arguments that its `update` needs.
      without: top-level parameters that it cannot work with.
      gradients: what it takes in the place of gradients, made of them.
      wrap: what it takes in the place of parameters, made of them.
      fast: the parameters in that.
      oracle: by which values are traced through its updates: `'variation'` or `'shifts'`.
      explicit: why its update does not run on a mesh of `Explicit` axes; empty if it does.
      dtype: the dtype of the parameters.
      rtol: the relative tolerance between sharded and unsharded, where the default is too tight.
      grows: whether the first update gives the state leaves that it did not have.
    """

    make: Callable[[Params], Transformation]
    extras: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    gradients: Callable[[Params], Params] = lambda gradients: gradients
    wrap: Callable[[Params], Params] = lambda params: params
    fast: Callable[[Params], Params] = lambda params: params
    oracle: str = "variation"
    explicit: str = ""
    dtype: Any = jnp.float32
    rtol: float | None = None
    grows: bool = False

    def build(self, params: Params) -> Transformation:
        """Makes the transformation for parameters; some that Optax exports are deprecated."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            return optax.with_extra_args_support(self.make(params))


def exported() -> dict[str, str]:
    """Every public constructor of a transformation: its name, and the annotated result.

    What has no annotation is in it, too.
    """
    modules: dict[str, ModuleType] = {
        "": optax,
        "contrib.": contrib,
        "transforms.": transforms,
    }
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
            if (
                not annotation
                or "GradientTransformation" in annotation
                or "Aggregator" in annotation
            ):
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


def is_matrix(params: Params) -> Params:
    """A mask: matrices are in."""
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


def by_rank(params: Params) -> Params:
    """Labels: matrices, and the rest."""
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "rest", params)


def _prefix(value: Callable[[str], Any], params: Params) -> Params:
    """A prefix tree: one value per top-level parameter."""
    return {name: value(name) for name in params}


def _per_example(gradients: Params) -> Params:
    return jax.tree.map(lambda g: jnp.stack([g, 0.5 * g]), gradients)


def _adafactor(**options: Any) -> Transformation:
    return optax.adafactor(1e-2, min_dim_size_to_factor=MIN_DIM, **options)


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MomentumDataclass:
    """The same as a dataclass."""

    steps: Any
    velocity: Any
    row_scale: Any


class Preconditioners(NamedTuple):
    """A state like Shampoo's: for each parameter one `[n, n]` matrix per dimension."""

    statistics: Any
    momentum: Any


def momentum(make: Callable[..., Any], get: Callable[[Any, str], Any] = getattr) -> Transformation:
    """A user's transformation: a velocity, and a scale per row of a matrix."""

    def row(leaf: Any) -> Any:
        return jnp.sum(leaf, axis=-1) if leaf.ndim == 2 else jnp.zeros((), leaf.dtype)

    def init(params: Params) -> Any:
        velocity = jax.tree.map(jnp.zeros_like, params)
        return make(
            steps=jnp.zeros((), jnp.int32), velocity=velocity, row_scale=jax.tree.map(row, velocity)
        )

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        velocity = jax.tree.map(lambda v, u: 0.9 * v + u, get(state, "velocity"), updates)
        rows = jax.tree.map(lambda r, u: r + row(u), get(state, "row_scale"), updates)
        return velocity, make(steps=get(state, "steps") + 1, velocity=velocity, row_scale=rows)

    return optax.GradientTransformation(init, update)


def list_of_leaves() -> Transformation:
    """A user's transformation whose state is a list, one entry per parameter leaf."""

    def init(params: Params) -> Any:
        return [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(params)]

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        return updates, [s + u for s, u in zip(state, jax.tree.leaves(updates), strict=True)]

    return optax.GradientTransformation(init, update)


def preconditioners() -> Transformation:
    """A user's transformation with a statistic `[n, n]` for each dimension of size n."""

    def statistics(leaf: Any) -> list[Any]:
        flat = [jnp.moveaxis(leaf, d, 0).reshape(leaf.shape[d], -1) for d in range(leaf.ndim)]
        return [x @ x.T for x in flat]

    def init(params: Params) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Preconditioners(jax.tree.map(statistics, zeros), zeros)

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        new = jax.tree.map(lambda u, old: _added(old, statistics(u)), updates, state.statistics)
        moved = jax.tree.map(lambda m, u: 0.9 * m + u, state.momentum, updates)
        return moved, Preconditioners(new, moved)

    return optax.GradientTransformation(init, update)


def _added(old: list[Any], new: list[Any]) -> list[Any]:
    return [a + b for a, b in zip(old, new, strict=True)]


def _always(make: Callable[[], Transformation], **options: Any) -> Case:
    """A case whose transformation does not depend on the parameters."""
    return Case(lambda _: make(), **options)


def _main() -> Iterator[tuple[str, Case]]:
    """Constructors of `optax` itself, apart from wrappers."""
    simple: Mapping[str, Callable[[], Transformation]] = {
        "adabelief": lambda: optax.adabelief(1e-2),
        "adadelta": lambda: optax.adadelta(1e-2),
        "adafactor": _adafactor,
        "adafactor: momentum": lambda: _adafactor(momentum=0.9, dtype_momentum=jnp.bfloat16),
        "adafactor: unfactored": lambda: optax.adafactor(1e-2, factored=False),
        "adafactor: weight decay": lambda: _adafactor(weight_decay_rate=1e-3, momentum=0.9),
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
    for name, make in simple.items():
        yield name, _always(make, explicit=explicit.get(name, ""))
    yield "adam: complex", _always(lambda: optax.adam(1e-2), dtype=jnp.complex64)
    yield (
        "chain: complex",
        _always(
            lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9)),
            dtype=jnp.complex64,
        ),
    )
    # The minimum over no axes at all, the maximum over no elements.
    for name, make in {"sm3": lambda: optax.sm3(1e-2), "scale_by_sm3": optax.scale_by_sm3}.items():
        yield name, _always(make, without=("scalar", "empty"))
    for name in ("polyak_sgd", "scale_by_polyak"):
        yield name, _always(getattr(optax, name), extras=("value",))
    searches = ("value", "grad", "value_fn")
    search = {"extras": searches, "explicit": AMBIGUOUS, "rtol": 1e-3}
    yield "scale_by_lbfgs", _always(lambda: optax.scale_by_lbfgs(3), explicit=AMBIGUOUS)
    yield (
        "lbfgs: no search",
        _always(lambda: optax.lbfgs(1e-1, memory_size=2, linesearch=None), explicit=AMBIGUOUS),
    )
    yield "lbfgs", _always(lambda: optax.lbfgs(memory_size=4), **search)
    yield (
        "scale_by_backtracking_linesearch",
        _always(lambda: optax.scale_by_backtracking_linesearch(3, store_grad=True), **search),
    )
    yield (
        "scale_by_backtracking_linesearch: no gradient",
        _always(lambda: optax.scale_by_backtracking_linesearch(3), **search),
    )
    yield "scale_by_zoom_linesearch", _always(lambda: optax.scale_by_zoom_linesearch(3), **search)
    # A measurement appears in the state with the first update; before, there is nothing to shard.
    yield "monitor", _always(lambda: optax.monitor({"norm": optax.tree.norm}), grows=True)


def _wrappers() -> Iterator[tuple[str, Case]]:
    """Wrappers of `optax` itself."""
    always = {
        "apply_if_finite": lambda: optax.apply_if_finite(_adafactor(), 3),
        "chain": lambda: optax.chain(
            optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(-1e-2)
        ),
        "chain: nested": lambda: optax.chain(
            optax.chain(optax.trace(0.9), _adafactor()), optax.chain(optax.scale_by_rms())
        ),
        "conditionally_mask": lambda: optax.conditionally_mask(
            optax.adam(1e-2), lambda step, **_: step != 1
        ),
        "conditionally_transform": lambda: optax.conditionally_transform(
            _adafactor(), lambda step, **_: step != 1
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
            {"matrix": _adafactor(), "rest": optax.adam(1e-2)}, by_rank
        ),
        "named_chain": lambda: optax.named_chain(
            ("clip", optax.clip(1e3)), ("factored", _adafactor()), ("adam", optax.adam(1e-2))
        ),
        "named_chain: MultiSteps": lambda: optax.named_chain(
            ("steps", _multi_steps(_adafactor(momentum=0.9))), ("trace", optax.trace(0.9))
        ),
        "partition: integers": lambda: optax.partition(
            {0: optax.adam(1e-2), 1: optax.set_to_zero()},
            lambda params: jax.tree.map(lambda leaf: int(leaf.ndim != 2), params),
        ),
        "with_extra_args_support": lambda: optax.with_extra_args_support(optax.trace(0.9)),
        "MultiSteps": lambda: _multi_steps(optax.adamw(1e-2)),
        "MultiSteps: factored": lambda: _multi_steps(_adafactor()),
        "MultiSteps: not finite": lambda: _multi_steps(
            optax.adam(1e-2), should_skip_update_fn=optax.skip_not_finite
        ),
        "MultiSteps: large": lambda: _multi_steps(
            _adafactor(),
            should_skip_update_fn=lambda u, step, params: optax.skip_large_updates(
                u, step, params, max_squared_norm=1e9
            ),
        ),
    }
    for name, make in always.items():
        yield name, _always(make)
    yield "flatten", _always(lambda: optax.flatten(optax.adam(1e-2)), explicit=CONCATENATES)
    yield "freeze", Case(lambda params: optax.freeze(is_matrix(params)))
    yield (
        "masked: leaves",
        Case(lambda params: optax.masked(_adafactor(momentum=0.9), is_matrix(params))),
    )
    yield (
        "masked: prefix",
        Case(lambda p: optax.masked(_adafactor(), _prefix(lambda name: name != "layers", p))),
    )
    yield (
        "masked: twice",
        Case(
            lambda params: optax.masked(
                optax.chain(
                    optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(lambda _: True, p)),
                    optax.trace(0.9),
                ),
                is_matrix(params),
            )
        ),
    )
    yield (
        "partition",
        Case(
            lambda params: optax.partition(
                {"matrix": optax.lion(1e-2), "rest": _adafactor()}, by_rank(params)
            )
        ),
    )
    yield (
        "partition: prefix",
        Case(
            lambda params: optax.partition(
                {"a": _adafactor(momentum=0.9), "b": optax.freeze(True)},
                _prefix(lambda name: "b" if name == "square" else "a", params),
            )
        ),
    )
    yield (
        "partition: nested",
        Case(
            lambda params: _multi_steps(
                optax.chain(
                    optax.clip_by_global_norm(1.0),
                    optax.partition(
                        {
                            "matrix": optax.inject_hyperparams(optax.adam)(1e-2),
                            "rest": optax.apply_if_finite(_adafactor(), 2),
                        },
                        by_rank,
                    ),
                )
            )
        ),
    )
    yield (
        "selective_transform",
        Case(lambda p: optax.selective_transform(optax.adam(1e-2), freeze_mask=is_matrix(p))),
    )
    yield (
        "lookahead",
        _always(
            lambda: optax.lookahead(_adafactor(momentum=0.9), 2, 0.5),
            wrap=optax.LookaheadParams.init_synced,
            fast=lambda params: params.fast,
        ),
    )


def _multi_steps(inner: Transformation, **options: Any) -> Transformation:
    return optax.MultiSteps(inner, 2, **options).gradient_transformation()


def _contrib() -> Iterator[tuple[str, Case]]:
    """Constructors of `optax.contrib` and of `optax.experimental`."""
    simple: Mapping[str, Callable[[], Transformation]] = {
        "acprop": lambda: contrib.acprop(1e-2),
        "ademamix": lambda: contrib.ademamix(1e-2),
        "adopt": lambda: contrib.adopt(1e-2),
        "cocob": contrib.cocob,
        "dog": contrib.dog,
        "dowg": contrib.dowg,
        "madgrad": lambda: contrib.madgrad(1e-2),
        "normalize": contrib.normalize,
        "scale_by_acprop": contrib.scale_by_acprop,
        "scale_by_ademamix": contrib.scale_by_ademamix,
        "scale_by_adopt": contrib.scale_by_adopt,
        "scale_by_cocob": contrib.scale_by_cocob,
        "scale_by_madgrad": lambda: contrib.scale_by_madgrad(1e-2),
        "scale_by_simplified_ademamix": contrib.scale_by_simplified_ademamix,
        "schedule_free": lambda: contrib.schedule_free(optax.adam(1e-2), 1e-2),
        "schedule_free: factored": lambda: contrib.schedule_free(_adafactor(), 1e-2),
        "schedule_free_adamw": contrib.schedule_free_adamw,
        "schedule_free_sgd": contrib.schedule_free_sgd,
        "simplified_ademamix": lambda: contrib.simplified_ademamix(1e-2),
        "sam": lambda: contrib.sam(optax.adam(1e-2), contrib.normalize(), sync_period=2),
        "sam: factored": lambda: contrib.sam(_adafactor(), optax.sgd(1e-2, 0.9), sync_period=2),
    }
    for name, make in simple.items():
        yield f"contrib.{name}", _always(make)
    ambiguous: Mapping[str, Callable[[], Transformation]] = {
        "dadapt_adamw": contrib.dadapt_adamw,
        "prodigy": contrib.prodigy,
        "mechanize": lambda: contrib.mechanize(optax.adam(1e-2)),
        "mechanize: factored": lambda: contrib.mechanize(_adafactor(momentum=0.9)),
    }
    for name, make in ambiguous.items():
        yield f"contrib.{name}", _always(make, explicit=AMBIGUOUS)
    yield (
        "contrib.muon",
        _always(lambda: contrib.muon(1e-2), without=("empty",), explicit=AMBIGUOUS),
    )
    for name in ("momo", "momo_adam"):
        make = getattr(contrib, name)
        yield f"contrib.{name}", _always(make, extras=("value",), explicit=AMBIGUOUS)
    yield "contrib.reduce_on_plateau", _always(contrib.reduce_on_plateau, extras=("value",))
    yield (
        "contrib.sam: opaque",
        _always(
            lambda: contrib.sam(
                optax.adam(1e-2),
                optax.sgd(1e-2, 0.9),
                sync_period=2,
                opaque_mode=True,
                reset_state=False,
            ),
            extras=("grad_fn",),
        ),
    )
    for suffix, dtype in (("", jnp.float32), (": complex", jnp.complex64)):
        yield (
            "contrib.split_real_and_imaginary" + suffix,
            _always(
                lambda: contrib.split_real_and_imaginary(_adafactor(momentum=0.9)), dtype=dtype
            ),
        )
    dimensions = {"consistent_rms": 0.2} if "consistent_rms" in _arguments(contrib.muon) else {}
    if "muon_weight_dimension_numbers" in _arguments(contrib.muon):
        numbers = contrib.MuonDimensionNumbers
        yield (
            "contrib.muon: dimensions",
            Case(
                lambda params: contrib.muon(
                    1e-2, muon_weight_dimension_numbers=_matrices_as(numbers, params), **dimensions
                ),
                without=("empty",),
                explicit=AMBIGUOUS,
            ),
        )
        # Its default for the dimension numbers fails on every tree that is not one matrix.
        yield (
            "contrib.scale_by_muon",
            Case(
                lambda params: contrib.scale_by_muon(
                    weight_dimension_numbers=jax.tree.map(lambda _: numbers(), params)
                ),
                without=("scalar", "bias", "conv", "layers", "empty"),
                explicit=AMBIGUOUS,
            ),
        )
    yield (
        "contrib.sophia",
        _always(lambda: contrib.sophia(1e-2, update_interval=1), extras=("obj_fn",)),
    )
    yield (
        "contrib.hutchinson_estimator_diag_hessian",
        _always(contrib.hutchinson_estimator_diag_hessian, extras=("obj_fn",)),
    )
    per_example = {"gradients": _per_example}
    yield (
        "contrib.differentially_private_aggregate",
        _always(
            lambda: contrib.differentially_private_aggregate(1.0, 0.0, key=jax.random.key(0)),
            **per_example,
        ),
    )
    yield (
        "contrib.dpsgd",
        _always(lambda: contrib.dpsgd(1e-2, 1.0, 0.0, 0, momentum=0.9), **per_example),
    )
    if hasattr(contrib, "galore"):
        # Singular vectors have no sign of their own, and none to show where a gradient is of rank
        # one; sharded sums come out a little different, which they magnify.
        galore = {
            "oracle": "shifts",
            "explicit": SVD,
            "rtol": 1e-2,
            "without": ("empty", "row"),
        }
        yield "contrib.galore", _always(lambda: contrib.galore(1e-2, rank=RANK), **galore)
        yield (
            "contrib.galore: momentum",
            _always(
                lambda: contrib.galore(1e-2, rank=RANK, base_optimizer=optax.trace(0.9)), **galore
            ),
        )
        yield (
            "contrib.scale_by_galore",
            _always(lambda: contrib.scale_by_galore(rank=RANK), **galore),
        )
    if aggregating is None:
        return
    prefix = "experimental.aggregating."
    yield prefix + "accumulate_avg_updates", _always(lambda: aggregating.accumulate_avg_updates(2))
    yield (
        prefix + "average_per_element_updates",
        _always(aggregating.average_per_element_updates, **per_example),
    )
    yield (
        prefix + "average_incrementally_updates",
        _always(lambda: aggregating.average_incrementally_updates(0, 2), **per_example),
    )
    yield (
        prefix + "get_per_element_mean_and_sum_sq_diff_grads",
        _always(
            lambda: _first(aggregating.get_per_element_mean_and_sum_sq_diff_grads(0, 2)),
            **per_example,
        ),
    )
    yield (
        prefix + "track_per_element_mean_and_variance_with_ema",
        _always(
            aggregating.track_per_element_mean_and_variance_with_ema,
            extras=("sum_sq_diff_grads", "sample_size"),
        ),
    )
    yield (
        prefix + "process",
        _always(
            lambda: aggregating.process(
                optax.identity(), aggregating.average_per_element_updates(), optax.adam(1e-2)
            ),
            **per_example,
        ),
    )
    yield (
        prefix + "add_mean_variance_to_opt",
        _always(lambda: aggregating.add_mean_variance_to_opt(_adafactor()), **per_example),
    )


def _first(aggregator: Transformation) -> Transformation:
    """An aggregator without what it returns beside the updates."""

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        (updates, _), state = aggregator.update(updates, state, params)
        return updates, state

    return optax.GradientTransformation(aggregator.init, update)


def _arguments(function: Callable[..., Any]) -> Mapping[str, Any]:
    return inspect.signature(function).parameters


def _users() -> Iterator[tuple[str, Case]]:
    """What Optax does not have, but its users do."""
    yield "user: NamedTuple", _always(lambda: momentum(Momentum))
    yield "user: dataclass", _always(lambda: momentum(MomentumDataclass))
    yield "user: dict", _always(lambda: momentum(dict, dict.__getitem__))
    yield "user: OrderedDict", _always(lambda: momentum(OrderedDict, OrderedDict.__getitem__))
    yield (
        "user: in a chain",
        _always(lambda: _multi_steps(optax.chain(_adafactor(), momentum(MomentumDataclass)))),
    )
    yield "user: list of leaves", _always(list_of_leaves)
    yield "user: preconditioners", _always(preconditioners, without=("empty",), explicit=AMBIGUOUS)


def _table() -> dict[str, Case]:
    everything = [*_main(), *_wrappers(), *_contrib(), *_users()]
    assert len(everything) == len(dict(everything)), "a name is there twice"
    return {name: case for name, case in everything if _is_there(name)}


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
