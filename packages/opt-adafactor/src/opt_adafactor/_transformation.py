"""Adafactor as Optax transformations, with the plan and the update of the definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from opt_core import OptimizerState

from opt_adafactor._adafactor import Adafactor
from opt_adafactor._rules import HParamMap
from opt_adafactor._state import FLOAT32, by_param, by_slot
from opt_adafactor._update import update_tree

if TYPE_CHECKING:
    import optax


class AdafactorState(NamedTuple):
    """The state of `adafactor`; all fields except `count` have the structure of the parameters.

    `v_row`, `v_col` and `v` are those of `optax.FactoredState`; unused leaves are float32 zeros of
    shape (1,).

    Attributes:
      count: int32 scalar; number of updates made.
      v_row: float32; second moments averaged over the columns.
      v_col: float32; second moments averaged over the rows.
      v: float32; second moments of parameters that are not factored.
      m: the momentum, or `None`.
    """

    count: Any
    v_row: Any
    v_col: Any
    v: Any
    m: Any


def require_optax() -> Any:
    """Returns the module `optax`, or raises an `ImportError` that names the extra."""
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            'this function needs Optax. Install it with `pip install "opt-adafactor[optax]"`'
        ) from error
    return optax


def adafactor(
    learning_rate: Any = None,
    factored: bool = True,
    multiply_by_parameter_scale: bool | HParamMap = True,
    beta1: Any = None,
    decay_rate: Any = 0.8,
    step_offset: Any = 0,
    clipping_threshold: Any = 1.0,
    weight_decay_rate: Any = None,
    min_dim_size_to_factor: int = 128,
    epsilon1: Any = 1e-30,
    epsilon2: Any = 1e-3,
    dtype_momentum: Any = FLOAT32,
    factor_map: HParamMap | None = None,
    logical_factor_rules: Mapping[str, Any] | None = None,
    weight_decay_rate_lr_exponent: Any = None,
    global_norm_clip_threshold: Any = None,
    max_parameter_scale: Any = None,
    skip_nan_updates: bool = False,
    respect_rank2_rules: bool = False,
    *,
    param_axes: Any = None,
    weight_decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns `Adafactor` as an Optax gradient transformation.

    Updates are computed in float32 or wider, whatever the dtype of the gradients. Equivalent to
    `optax.adafactor` for parameters of rank 2 and below, where `beta1` is called `momentum`,
    `step_offset` `decay_offset`, and `epsilon1` `eps`. Arguments are those of `Adafactor`, which
    documents them and the update rule, except:

    - `learning_rate`: a schedule is called with the count. `None` counts as 1.
    - `logical_factor_rules`: the `FactorDim` of each logical axis name; requires `param_axes`.
    - `skip_nan_updates`: skipped entries get a zero update.
    - `param_axes`: the logical axes of the parameters; see `Adafactor.with_param_axes`.
    - `weight_decay_mask`: which parameters to decay: a tree of booleans like the parameters or a
      prefix of it, or a function that returns one for the parameters. `None` for all.

    Returns:
      A transformation whose state is an `AdafactorState`. `update` requires the parameters.

    Raises:
      ImportError: Optax is not installed.
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range.

    Examples:
      >>> import optax
      >>> tx = adafactor(optax.linear_schedule(0.1, 0.0, 10), min_dim_size_to_factor=2)
      >>> params = {'w': jnp.ones((3, 2))}
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> optax.apply_updates(params, updates)['w'][0].tolist(), state.v_row['w'].shape
      ([0.9, 0.9], (2,))
    """
    arguments = dict(locals())  # those of `Adafactor`, and two more
    del arguments["param_axes"], arguments["weight_decay_mask"]
    optax = require_optax()
    if learning_rate is None:
        arguments["learning_rate"] = 1.0
    definition = _with_axes(Adafactor(**arguments), param_axes)

    def init(params: Any) -> AdafactorState:
        return _init(definition, params)

    def update(
        updates: Any, state: AdafactorState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, AdafactorState]:
        del extra_args
        return _update(definition, updates, state, params, weight_decay_mask)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[no-any-return]


def scale_by_generalized_factored_rms(
    factored: bool = True,
    decay_rate: Any = 0.8,
    step_offset: Any = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: Any = 1e-30,
    clipping_threshold: Any = None,
    *,
    factor_map: HParamMap | None = None,
    logical_factor_rules: Mapping[str, Any] | None = None,
    param_axes: Any = None,
    respect_rank2_rules: bool = False,
) -> optax.GradientTransformation:
    """Like `optax.scale_by_factored_rms`, with factor rules for parameters of any rank.

    ```
    u = g / sqrt(v_row / mean(v_row, rows)) / sqrt(v_col)
    u = u / max(1, rms(u) / clipping_threshold)
    ```

    Arguments are those of `adafactor`, where `epsilon` is called `epsilon1`.

    Returns:
      A transformation whose state is an `optax.FactoredState`, in float32 whatever the dtype of the
      parameters. `update` requires the parameters, for their paths.

    Raises:
      ImportError: Optax is not installed.
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range.

    Examples:
      >>> scanned = HParamMap([('wi', ('row', 'batch', 'column'))])
      >>> tx = scale_by_generalized_factored_rms(factor_map=scanned)
      >>> tx.init({'wi': jnp.ones((16, 3, 24))}).v_col['wi'].shape
      (3, 24)
    """
    optax = require_optax()
    definition = Adafactor(
        1.0,
        factored,
        multiply_by_parameter_scale=False,
        decay_rate=decay_rate,
        step_offset=step_offset,
        clipping_threshold=clipping_threshold,
        min_dim_size_to_factor=min_dim_size_to_factor,
        epsilon1=epsilon,
        factor_map=factor_map,
        logical_factor_rules=logical_factor_rules,
        respect_rank2_rules=respect_rank2_rules,
    )
    definition = _with_axes(definition, param_axes)

    def init(params: Any) -> Any:
        return optax.FactoredState(*_init(definition, params)[:4])

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        own = AdafactorState(state.count, state.v_row, state.v_col, state.v, None)
        new, own = _update(definition, updates, own, params)
        return jax.tree.map(jnp.negative, new), optax.FactoredState(*own[:4])

    return optax.GradientTransformation(init, update)  # type: ignore[no-any-return]


def _with_axes(definition: Adafactor, param_axes: Any) -> Adafactor:
    rules = definition.hyper_params.logical_factor_rules
    if (rules is None) != (param_axes is None):
        names = ["logical_factor_rules", "param_axes"]
        missing, given = names if rules is None else reversed(names)
        raise ValueError(
            f"`{given}` is given without `{missing}`: factor rules by logical axis need both. Pass "
            f"`{missing}` too"
        )
    return definition if rules is None else definition.with_param_axes(param_axes)


def _init(definition: Adafactor, params: Any) -> AdafactorState:
    return _to_optax(definition.init_state(params), definition.hyper_params.beta1)


def _update(
    definition: Adafactor, updates: Any, state: AdafactorState, params: Any, mask: Any = None
) -> tuple[Any, AdafactorState]:
    if params is None:
        raise ValueError(
            "`params` is None: Adafactor needs the parameters for their scale and their paths; "
            "call `update(grads, state, params)`"
        )
    if callable(mask):
        mask = mask(params)
    new, own = update_tree(
        definition.hyper_params,
        params,
        OptimizerState(state.count, by_param(*state[1:])),
        updates,
        as_updates=True,
        decay_mask=True if mask is None else mask,
    )
    return new, _to_optax(own, state.m)


def _to_optax(state: OptimizerState, momentum: Any) -> AdafactorState:
    """Returns one tree per slot, without `m` if `momentum` is `None`."""
    own = AdafactorState(state.step, **by_slot(state.param_states))
    return own if momentum is not None else own._replace(m=None)
