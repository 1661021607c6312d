"""The optimizers of `flax.optim` by their equals in Optax, where there is one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from opt_core import Optimizer, describe_state, to_state_dict
from opt_core.extend import Names, named_leaves, path_str
from opt_optax_bridge import OptaxWrapper, wrap_optax_optimizer

from opt_checkpoint.errors import EquivalenceError, LoadError

DYNAMIC_SCALE = (
    "it is not an optimizer. It lives on as `flax.training.dynamic_scale.DynamicScale`, which "
    "takes its file: `flax.serialization.from_state_dict(DynamicScale(), read_legacy(file))`"
)


@dataclasses.dataclass(frozen=True)
class Equal:
    """One optimizer of `flax.optim`."""

    name: str  # of its class
    constructor: Callable[..., optax.GradientTransformation]  # of Optax's, by names of `flax.optim`
    slots: Mapping[str, str]  # `transformation/field` of Optax: field of `flax.optim`
    sign: int = 1  # what the values are multiplied by
    # a hyper-parameter that Optax lacks, whether a value makes no difference, and why others do
    lacks: tuple[str, Callable[[Any], bool], str] | None = None

    @property
    def fields(self) -> frozenset[str]:
        """The fields of `flax.optim`'s state of a parameter."""
        return frozenset(self.slots.values())


def _decayed(scaling: Any, weight_decay: float, rate: Any) -> optax.GradientTransformation:
    """A transformation with the weight decay of AdamW."""
    return optax.chain(scaling, optax.add_decayed_weights(weight_decay), optax.sgd(rate))


def _adafactor(
    learning_rate: Any,
    factored: bool = True,
    multiply_by_parameter_scale: bool = True,
    beta1: float | None = None,
    decay_rate: float = 0.8,
    step_offset: int = 0,
    clipping_threshold: float | None = 1.0,
    weight_decay_rate: float | None = None,
    min_dim_size_to_factor: int = 128,
    epsilon1: float = 1e-30,
    dtype_momentum: Any = "float32",
) -> optax.GradientTransformation:
    return optax.adafactor(
        learning_rate,
        min_dim_size_to_factor,
        decay_rate,
        step_offset,
        multiply_by_parameter_scale,
        clipping_threshold,
        beta1,
        dtype_momentum,
        weight_decay_rate,
        epsilon1,
        factored,
    )


def _moments(transformation: str) -> dict[str, str]:
    return {f"{transformation}/mu": "grad_ema", f"{transformation}/nu": "grad_sq_ema"}


_TRACE = {"trace/trace": "momentum"}

# The constructors have the names and defaults of `flax.optim`.
_EQUALS = (
    Equal("GradientDescent", lambda learning_rate: optax.sgd(learning_rate), {}),
    Equal(
        "Momentum",  # the decay is added to the gradient
        lambda learning_rate, beta=0.9, weight_decay=0.0, nesterov=False: optax.chain(
            optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate, beta, nesterov)
        ),
        _TRACE,
    ),
    Equal(
        "Adam",  # it is AdamW
        lambda learning_rate, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0: optax.adamw(
            learning_rate, beta1, beta2, eps, weight_decay=weight_decay
        ),
        _moments("adam"),
    ),
    Equal(
        "LAMB",  # an all-zero update keeps the leaf in Optax, and made it NaN there
        lambda learning_rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-6: optax.lamb(
            learning_rate, beta1, beta2, eps, weight_decay=weight_decay
        ),
        _moments("adam"),
    ),
    Equal(
        "LARS",
        lambda learning_rate, beta=0.9, trust_coefficient=0.001, eps=0.0, nesterov=False: (
            optax.lars(
                learning_rate,
                trust_coefficient=trust_coefficient,
                eps=eps,
                momentum=beta,
                nesterov=nesterov,
            )
        ),
        _TRACE,
        sign=-1,  # Optax applies the rate, which is negative, before it averages.
        lacks=(
            "weight_decay",
            lambda decay: decay == 0,
            (
                "its trust ratio is |p| / (|g| + decay |p|), that of `optax.lars` is "
                "|p| / |g + decay p|. Steps differ by up to a half. Restore without "
                "`weight_decay`, or into `opt_optax_bridge.lars(...)` with `written_by='LARS'` to "
                "continue with that"
            ),
        ),
    ),
    Equal(
        "Adagrad",  # an `eps` that only prevents a division by zero
        lambda learning_rate: optax.adagrad(learning_rate, initial_accumulator_value=0.0, eps=0.0),
        {"rss/sum_of_squares": "G"},
        lacks=(
            "eps",
            lambda eps: eps <= 1e-8,
            (
                "it divides by sqrt(G) + eps, `optax.adagrad` by sqrt(G + eps). Up to 1e-8 steps "
                "differ by `eps` in the size of the gradients, which is nothing in float32"
            ),
        ),
    ),
    Equal(
        "RMSProp",
        lambda learning_rate, beta2=0.9, eps=1e-8, centered=False: optax.rmsprop(
            learning_rate, beta2, eps, eps_in_sqrt=False, centered=centered
        ),
        {"rms/nu": "v", "stddev/nu": "v", "stddev/mu": "mg"},
    ),
    Equal(
        "Adadelta",  # the decay is AdamW's, not that of `optax.adadelta`
        lambda learning_rate, rho=0.9, eps=1e-6, weight_decay=0.0: _decayed(
            optax.scale_by_adadelta(rho, eps), weight_decay, learning_rate
        ),
        {"adadelta/e_g": "sq_avg", "adadelta/e_x": "acc_delta"},
    ),
    Equal(
        "AdaBelief",
        lambda learning_rate, beta1=0.9, beta2=0.999, eps=1e-16, weight_decay=0.0: _decayed(
            optax.scale_by_belief(beta1, beta2, eps, eps_root=eps), weight_decay, learning_rate
        ),
        _moments("belief"),
    ),
    Equal(
        "Adafactor",
        _adafactor,
        {"factored_rms/v_row": "v_row", "factored_rms/v_col": "v_col", "factored_rms/v": "v"}
        | {"ema/ema": "m"},
        lacks=(
            "epsilon2",
            lambda epsilon: epsilon == 1e-3,
            (
                "`optax.adafactor` has fixed it at 0.001. `opt_adafactor.Adafactor` takes it, "
                "and its checkpoints"
            ),
        ),
    ),
)
EQUALS: Mapping[str, Equal] = {equal.name: equal for equal in _EQUALS}
for _equal in _EQUALS:
    _equal.constructor.__name__ = _equal.name.lower()  # what definitions and errors call it
_WEIGHT_NORM = frozenset({"direction_state", "scale_state", "direction", "scale"})
_NOT_CENTERED = frozenset({"v"})  # RMSProp until Flax 0.2.2
_FIELDS = {equal.fields for equal in _EQUALS} | {_NOT_CENTERED, _WEIGHT_NORM}
_HEAD = "state/param_states"
_WITHOUT_EQUAL = {
    "WeightNorm": (
        "Optax has no weight normalisation, and what was saved are moments of directions and "
        "scales, not of the parameters. Normalise in the model (`flax.linen.WeightNorm`), and take "
        "the parameters alone: `read_legacy(file)['target']`"
    ),
    "MultiOptimizer": "it is `opt_core.MultiOptimizer`: build it of the equals of its parts",
    "DynamicScale": DYNAMIC_SCALE,
}


def flax_optim_equivalent(name: str, **hyper_params: Any) -> OptaxWrapper:
    """Returns the wrapped Optax optimizer that computes what one of `flax.optim` did.

    Args:
      name: the class's name: `'Adam'`, `'Momentum'`, `'GradientDescent'`, `'LAMB'`, `'LARS'`,
        `'Adagrad'`, `'RMSProp'`, `'Adadelta'`, `'AdaBelief'`, `'Adafactor'`.
      **hyper_params: its hyper-parameters, by their names there and with their defaults.
        `learning_rate` may be a schedule, and can be overridden at every step, as it was there.

    Returns:
      A definition that knows which optimizer it stands for: `restore_legacy` puts the states that
      `flax.optim` saved where they belong.

    Raises:
      EquivalenceError: Optax has no equal, or not for these hyper-parameters; says why.

    Examples:
      >>> flax_optim_equivalent('Adam', learning_rate=0.1, beta2=0.98).hyper_params.beta2
      0.98
      >>> flax_optim_equivalent('LARS', learning_rate=0.1, weight_decay=1e-4)
      Traceback (most recent call last):
      ...
      opt_checkpoint.errors.EquivalenceError: `flax.optim.LARS` has no equal...
    """
    if name in _WITHOUT_EQUAL:
        raise EquivalenceError(f"`flax.optim.{name}`: {_WITHOUT_EQUAL[name]}.")
    if name not in EQUALS:
        raise EquivalenceError(
            f"`flax.optim` has no `{name}`; its optimizers are {', '.join(EQUALS)}."
        )
    equal = EQUALS[name]
    if equal.lacks is not None:
        param, is_nothing, why = equal.lacks
        if param in hyper_params and not is_nothing(value := hyper_params.pop(param)):
            raise EquivalenceError(
                f"`flax.optim.{name}` has no equal in Optax with `{param}` {value}: {why}."
            )
    params = inspect.signature(equal.constructor).parameters
    if unknown := sorted(set(hyper_params) - set(params)):
        raise EquivalenceError(
            f"`flax.optim.{name}` has no `{'`, `'.join(unknown)}`; it has `{'`, `'.join(params)}`."
        )
    if hyper_params.get("learning_rate") is None:
        raise EquivalenceError(
            "`learning_rate` is missing. Where every step was given one, give the first one here, "
            "or the schedule: `apply_gradient(grads, learning_rate=...)` still acts."
        )
    return wrap_optax_optimizer(equal.constructor)(**hyper_params)


def entries_of(target: Any, param_states: Any) -> dict[Names, Any]:
    """Returns what a state dict has at the path of each parameter, or `None`."""
    entries = {}
    for path, _ in named_leaves(target):
        entry = param_states
        for name in path:
            entry = entry.get(name) if isinstance(entry, Mapping) else None
        entries[path] = entry
    return entries


def is_per_parameter(entries: Mapping[Names, Any]) -> bool:
    """Whether what was kept of each parameter is of `flax.optim`, or `None`."""
    kept = [entry for entry in entries.values() if entry is not None]
    return bool(kept) and all(
        isinstance(entry, Mapping) and frozenset(entry) in _FIELDS for entry in kept
    )


def writer_of(
    definition: OptaxWrapper, name: str | None, where: str, entries: Mapping[Names, Any]
) -> Equal:
    """Returns the optimizer of `flax.optim` that a definition stands for, or the caller says."""
    if name is not None and name not in EQUALS:
        raise EquivalenceError(f"`written_by`: {name!r} is not one of {', '.join(EQUALS)}.")
    constructor = definition.recipe.constructor if definition.recipe else None
    stands_for = next((equal for equal in _EQUALS if equal.constructor is constructor), None)
    if name is None and stands_for is None and _is_adafactors(entries):
        raise EquivalenceError(
            f"the state in the file{where} is Adafactor's: `v_row`, `v_col`, `v`, `m`. Restore "
            "into `opt_adafactor.Adafactor`, then change it: `opt_core.regroup`, or save it and "
            "`plan_restore`. For Optax's own `adafactor` say `written_by='Adafactor'`."
        )
    if name is None and stands_for is None:
        raise EquivalenceError(
            f"a checkpoint of `flax.optim` does not say which optimizer wrote it{where}: restore "
            "into `flax_optim_equivalent('Adam', ...)`, or say `written_by='Adam'`."
        )
    if stands_for is not None and name not in (None, stands_for.name):
        says = f"stands for `flax.optim.{stands_for.name}`, and `written_by` says {name!r}"
        raise EquivalenceError(f"the optimizer{where} {says}.")
    return stands_for or EQUALS[str(name)]


def _is_adafactors(entries: Mapping[Names, Any]) -> bool:
    """Whether what was kept of each parameter has the fields of Adafactor, of T5X or Flax."""
    kept = {frozenset(entry) for entry in entries.values() if entry is not None}
    return kept == {EQUALS["Adafactor"].fields}


def optax_state(optimizer: Optimizer, equal: Equal, entries: Mapping[Names, Any], step: int) -> Any:
    """Returns the `param_states` of Optax, of what `equal` kept for each parameter."""
    values: list[Any] = []
    if not (problems := list(_entry_problems(equal, entries))):
        values, problems = _placed(optimizer, equal, entries, step)
    if problems:
        listed = "\n".join(f"  {_HEAD}/{line}" for line in problems)
        raise LoadError(
            f"the state that `flax.optim.{equal.name}` wrote does not fit this Optax optimizer:\n"
            f"{listed}\n`flax_optim_equivalent('{equal.name}', ...)` builds one that it fits."
        )
    structure = jax.tree.structure(optimizer.state.param_states)
    return to_state_dict(jax.tree.unflatten(structure, values))


def _entry_problems(equal: Equal, entries: Mapping[Names, Any]) -> Iterator[str]:
    """Yields the entries that the optimizer cannot have written."""
    accepted = {equal.fields} | ({_NOT_CENTERED} if equal.name == "RMSProp" else set())
    for names, entry in entries.items():
        path = path_str(names)
        if not isinstance(entry, Mapping):
            yield f"{path}: has no state: frozen when it was saved, and trained here"
        elif frozenset(entry) == _WEIGHT_NORM:
            yield f"{path}: was written by `WeightNorm`, which Optax lacks"
        elif frozenset(entry) not in accepted:
            fields = ", ".join(sorted(equal.fields)) or "none"
            yield f"{path}: has the fields {', '.join(sorted(entry))}; expected {fields}"


def _placed(
    optimizer: Optimizer, equal: Equal, entries: Mapping[Names, Any], step: int
) -> tuple[list[Any], list[str]]:
    """A value for each leaf of Optax's state, and what lacks a value or a place."""
    left = {(names, field): entry[field] for names, entry in entries.items() for field in entry}
    values: list[Any] = []
    problems = []
    for leaf in describe_state(optimizer).leaves:
        field = equal.slots.get("/".join((leaf.transformation, *leaf.field)), "")
        if leaf.parameter is not None and (leaf.parameter, field) in left:
            value = left.pop((leaf.parameter, field))
            if isinstance(value, np.ndarray | np.generic | jax.Array):
                values.append(value if equal.sign > 0 else np.negative(value))
            else:
                where = path_str(leaf.parameter)
                problems.append(f"{where}: has no array `{field}`, which is needed here")
        elif leaf.field == ("count",) and leaf.role in ("count", "schedule_count"):
            values.append(np.asarray(step, np.int32))
        else:
            problems.append(f"{path_str(leaf.path)}: the file has nothing for this")
    for (names, field), value in left.items():
        if value is not None and not _is_placeholder(value):
            problems.append(f"{path_str((*names, field))}: has no place in this optimizer's state")
    return values, problems


def _is_placeholder(value: Any) -> bool:
    """Whether it is Adafactor's placeholder of an unused field."""
    return np.shape(value) == (1,) and not np.any(value)
