"""An Optax transformation as an optimizer definition."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from opt_core import (
    Optimizer,
    OptimizerDef,
    OptimizerState,
    StateDescription,
    check_gradients,
    increment_step,
    to_state_dict,
)
from opt_core.errors import HyperParamError
from opt_core.extend import fingerprint, listed, reached, strip_weak_type, unalias
from opt_core.protocols import Transformation, UpdatesParams, WrapsTransformation

from opt_optax_bridge._describe import describe_optax
from opt_optax_bridge._overrides import (
    Update,
    ask,
    float_dtype,
    keep_avals,
    overridable_in_general,
    same_shapes,
)
from opt_optax_bridge._recipe import (
    Recipe,
    changed_fields,
    dumps,
    field_values,
    make_hyper_params,
)
from opt_optax_bridge._signatures import (
    how_to_override,
    missing_keywords,
    taken_keywords,
    takes_any_keyword,
)
from opt_optax_bridge._transformation import initial_state, updated

_BUILT = frozenset({"optax_optimizer", "recipe", "hyper_params", "built_with"})
_DERIVED = _BUILT | {"_built", "_origin", "_fingerprint_cache"}
_READ_ONLY = _BUILT | {"precision"}
_RESERVED = frozenset({"hyper_params", "missing", "updates", "state", "params", "grads"})
_FUNCTIONS = frozenset({"value_fn", "obj_fn", "grad_fn"})  # of line searches, `sophia`, `sam`


class OptaxWrapper(OptimizerDef):
    """An Optax transformation as an optimizer definition.

    The state and the compiled step are exactly Optax's. A definition made by a wrapped constructor
    (`opt_optax_bridge.adamw(...)`) can override its float-valued arguments at run time; one made
    from a transformation has nothing to override.

    Args:
      optax_optimizer: anything with Optax's `init` and `update`, `optax.MultiSteps` included; a
        definition is taken over with its hyper-parameters. One that also is
        `opt_core.protocols.UpdatesParams`, like `opt_accumulate.MultiSteps`, is passed the
        parameters themselves.

    Attributes:
      optax_optimizer: the transformation.
      recipe: how it was constructed, if known.
      hyper_params: a frozen dataclass of the arguments that can be overridden; empty if none.
      built_with: the hyper-parameters that the transformation was built with.
      precision: how parameters and state are stored, see `with_precision`.

    Examples:
      >>> optimizer = OptaxWrapper(optax.sgd(0.1)).create({'w': jnp.ones(2)})
      >>> optimizer.apply_gradient({'w': jnp.ones(2)}).target['w'].tolist()
      [0.9, 0.9]
    """

    _ignored: ClassVar[Any] = None  # hyper-parameters that T5X accepts and ignores

    optax_optimizer: Any
    recipe: Recipe | None
    built_with: Any
    precision: WrapsTransformation | None = None
    _built: Any

    def __init__(self, optax_optimizer: Any) -> None:
        if not isinstance(optax_optimizer, Transformation):
            advice = "Call the constructor, or wrap it with `wrap_optax_optimizer`"
            if isinstance(optax_optimizer, OptimizerDef):
                advice = "It is a definition: use it, or `as_transformation(definition)`"
            raise TypeError(
                "`optax_optimizer` must have Optax's `init` and `update`; got "
                f"{type(optax_optimizer).__name__}. {advice}."
            )
        if isinstance(optax_optimizer, OptaxWrapper):
            vars(self).update(vars(optax_optimizer))
            self._define(optax_optimizer.optax_optimizer, optax_optimizer.recipe)
        else:
            self._define(optax_optimizer, None)

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """Returns the definition of what `recipe` builds."""
        self = cls(recipe.build())
        self._define(self.optax_optimizer, recipe)
        return self

    def with_precision(self, precision: WrapsTransformation) -> Self:
        """Returns the definition with parameters and state stored in another way.

        Hyper-parameters stay those of this definition. In a `MultiOptimizer` each group has its
        own, and `opt_core.describe` lists it.

        Args:
          precision: makes a transformation of another, like `opt_precision.Precision`.

        Raises:
          TypeError: it does not.
          ValueError: the definition has a precision already.

        Examples:
          >>> import opt_optax_bridge as opt
          >>> definition = opt.sgd(0.1).with_precision(lambda tx: optax.chain(tx, optax.scale(2.0)))
          >>> optimizer = definition.create({'w': jnp.ones(2)})
          >>> optimizer.apply_gradient({'w': jnp.ones(2)}, learning_rate=0.25).target['w'].tolist()
          [0.5, 0.5]
        """
        if not isinstance(precision, WrapsTransformation):
            raise TypeError(
                "`precision` must make a transformation of another, like `opt_precision.Precision("
                f"weights='stochastic', state=opt_precision.dynamic8())`; got {precision!r}"
            )
        if self.precision is not None:
            raise ValueError(
                f"`precision`: this definition has a precision ({self.precision}). Begin with a "
                "definition without it."
            )
        recipe = Recipe(precision, (self,), {})
        transformation = recipe.build()
        if not isinstance(transformation, Transformation):
            raise TypeError(
                "`precision` must return a transformation, with Optax's `init` and `update`; "
                f"{precision!r} returned {type(transformation).__name__}"
            )
        new = type(self).__new__(type(self))
        vars(new).update(vars(self), precision=precision)
        new._define(transformation, recipe)
        return new

    def _define(self, optax_optimizer: Any, recipe: Recipe | None) -> None:
        built_with = recipe.hyper_params if recipe else make_hyper_params("no_hyper_params", {})
        vars(self).pop("_fingerprint_cache", None)  # of the definition that this one is made of
        vars(self).update(
            optax_optimizer=optax_optimizer,
            recipe=recipe,
            hyper_params=self._ignored or built_with,
            built_with=built_with,
            # Computed now: captured objects and globals may change later.
            _built=fingerprint(optax_optimizer),
            _origin=fingerprint(recipe.identity) if recipe else None,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _READ_ONLY:
            raise AttributeError(
                f"`{name}` of a definition cannot change. Build another definition, or override "
                "for one update: `apply_gradient(grads, hyper_params=...)`."
            )
        super().__setattr__(name, value)

    def init_state(self, params: Any) -> OptimizerState:
        """Returns Optax's initial state, every leaf a strongly typed array."""
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            shapes: OptimizerState = jax.eval_shape(self.init_state, params)
            return shapes
        init = self.optax_optimizer.init
        # Captured arrays, such as a key for noise, must survive donation of the state.
        captured = [value for value in reached(init) if isinstance(value, jax.Array)]
        param_states = unalias(init(params), apart_from=captured)
        return OptimizerState(
            step=jnp.zeros((), jnp.int32), param_states=jax.tree.map(_strong, param_states)
        )

    def init(self, params: Any) -> Any:
        """Returns the state of the transformation alone, as Optax's `init` does.

        With `update` the definition stands where an Optax transformation is expected: in
        `optax.chain`, `optax.MultiSteps`, `TrainState.create(tx=...)`, trainers.

        Args:
          params: pytree of parameters.

        Examples:
          >>> import opt_optax_bridge as opt
          >>> tx = optax.chain(optax.clip(1.0), opt.sgd(0.5))
          >>> params = {'w': jnp.ones(1)}
          >>> updates, state = tx.update({'w': jnp.full(1, 8.0)}, tx.init(params), params)
          >>> updates['w'].tolist()
          [-0.5]
        """
        return initial_state(self, params).param_states

    def update(
        self, updates: Any, state: Any, params: Any = None, **keywords: Any
    ) -> tuple[Any, Any]:
        """Returns updates and the new state, as Optax's `update` does.

        Args:
          updates: pytree of gradients.
          state: what `init` or `update` returned.
          params: the parameters; may be `None` for a transformation that does not need them.
          **keywords: hyper-parameters to override, and extra arguments; others are ignored, as in
            Optax. Its containers pass keywords on to `as_transformation(definition)` alone.
        """
        before = OptimizerState(jnp.zeros((), jnp.int32), state)
        updates, after = updated(self, params, before, updates, keywords)
        return updates, after.param_states

    def apply_gradient(
        self,
        hyper_params: Any,
        params: Any,
        state: OptimizerState,
        grads: Any,
        **extra_args: Any,
    ) -> tuple[Any, OptimizerState]:
        """Makes one update.

        Args:
          hyper_params: like `self.hyper_params`; fields that differ from it are overrides.
          params: pytree of parameters.
          state: the state that belongs to them.
          grads: pytree with the containers, keys and shapes of `params`. A transformation that
            averages over examples (`dpsgd`) takes them with an axis of examples in front.
          **extra_args: arguments of the transformation's `update`, such as `value`.

        Returns:
          The new parameters and state; structure, shapes, dtypes and weak types do not change.

        Raises:
          HyperParamError: an override has no effect on the update, or decides a Python branch,
            shapes or structure; or an extra argument is missing, or is one that nothing takes.
          StateChangedError: the transformation changed the structure or a shape of its state.
          TreeMismatchError: `grads` do not match `params`.
        """
        applies = isinstance(self.optax_optimizer, UpdatesParams)
        update = Update(self, grads, state.param_states, params, extra_args, applies)
        result, state = self._run(update, hyper_params, state)
        return result if applies else optax.apply_updates(params, result), state

    def compute_updates(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any, **extra_args: Any
    ) -> tuple[Any, OptimizerState]:
        """Returns what `apply_gradient` adds to the parameters, and the new state.

        Takes the arguments of `apply_gradient`; `params` may be `None` for a transformation that
        does not need them.
        """
        update = Update(self, grads, state.param_states, params, extra_args)
        return self._run(update, hyper_params, state)

    def _run(
        self, update: Update, hyper_params: Any, state: OptimizerState
    ) -> tuple[Any, OptimizerState]:
        """Returns the updates, or the parameters, and the new state."""
        tx, params, grads = self.optax_optimizer, update.params, update.grads
        if params is not None and not self.takes_per_example_grads(params, state, grads):
            check_gradients(params, grads)
        overrides = changed_fields(self.built_with, self._acting(hyper_params))
        try:
            if overrides or update.extra_args:
                result, param_states = update.run(overrides)
            elif update.applies:
                result, param_states = tx.apply(params, state.param_states, grads)
            else:
                result, param_states = tx.update(grads, state.param_states, params)
        except TypeError as error:
            if (named := missing_keywords(tx.update, error)) is None:
                raise
            raise named from error
        return result, OptimizerState(
            step=increment_step(state.step),
            param_states=keep_avals(state.param_states, param_states),
        )

    def _acting(self, hyper_params: Any) -> Any:
        """The hyper-parameters that take effect; the T5X facade ignores some."""
        return hyper_params

    def takes_per_example_grads(self, params: Any, state: OptimizerState, grads: Any) -> bool:
        """Whether all gradients, but no updates, have a leading axis of examples."""
        shapes, per_example = (
            [np.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (params, grads)
        )
        sizes = {shape[:1] for shape in per_example}
        if sizes in ({()}, set()) or len(sizes) > 1 or [s[1:] for s in per_example] != shapes:
            return False
        try:
            updates, _ = jax.eval_shape(
                self.optax_optimizer.update, grads, state.param_states, params
            )
        except Exception:
            return False  # the gradients do not fit, whatever the axes mean
        return same_shapes(params, updates)

    def build(self, overrides: Mapping[str, Any]) -> Any:
        """Returns the transformation, rebuilt if there are overrides."""
        if not overrides:
            return self.optax_optimizer
        assert self.recipe is not None, "only a recipe has hyper-parameters"
        return self.recipe.build(**overrides)

    def check_recipe(self) -> None:
        """Raises a `HyperParamError` if the constructor no longer builds the same object."""
        if self.recipe is None or fingerprint(self.recipe.build()) == self._built:
            return
        if fingerprint(self.recipe.build()) != fingerprint(self.recipe.build()):
            return  # the transformation cannot be compared
        raise HyperParamError(
            f"`{self.recipe.name}` no longer builds the same transformation for this definition: a "
            "global or an object that it reads has changed. Make it an argument of the "
            "constructor, and build a new definition."
        )

    def update_hyper_params(
        self, *, missing: Literal["error", "ignore"] = "error", **overrides: Any
    ) -> Any:
        """Returns hyper-parameters for one update; see `OptimizerDef.update_hyper_params`."""
        hyper_params = super().update_hyper_params(
            missing=missing, hyper_params=overrides.pop("hyper_params", self.hyper_params)
        )
        if type(hyper_params) is not type(self.hyper_params):
            raise HyperParamError(
                f"`hyper_params` must be a {type(self.hyper_params).__name__}; got "
                f"{type(hyper_params).__name__}. Use `optimizer_def.hyper_params.replace(...)`."
            )
        if not overrides:
            return hyper_params
        overrides = self.recipe.by_field(overrides) if self.recipe else overrides
        unknown = overrides.keys() - field_values(self.hyper_params).keys()
        if structural := [
            name for name in overrides if name in unknown and self._is_argument(name)
        ]:
            raise HyperParamError(
                f"{listed(structural)} cannot be overridden at run time: only arguments that are "
                f"a float or a schedule can. Of this optimizer these may be: {self._overridable()}"
            )
        if unknown:
            raise self.unknown_names_error([name for name in overrides if name in unknown])
        return dataclasses.replace(hyper_params, **overrides)

    def unknown_names_error(self, names: Collection[str]) -> HyperParamError:
        """Returns the error for keywords that nothing in this definition takes."""
        overridable = self._overridable()
        hint = ""
        if overridable == "none":
            overridable = "it has none"
            hint = f". {how_to_override(self.optax_optimizer, names)}"
        return HyperParamError(
            f"{listed(names)}: neither a hyper-parameter of this optimizer ({overridable}) nor an "
            f"extra argument that its transformation takes{hint}"
        )

    def has_hyper_param(self, name: str) -> bool:
        """Returns whether `name` is a hyper-parameter, possibly of several parts of a chain."""
        is_of_parts = self.recipe is not None and self.recipe.has_hyper_param(name)
        return is_of_parts or super().has_hyper_param(name)

    def resolve_hyper_params(
        self, hyper_params: Any, params: Any, state: OptimizerState, **extra_args: Any
    ) -> Any:
        """Returns the hyper-parameters of an update; see `opt_optax_bridge.resolve_hyper_params`.

        Takes the arguments of `apply_gradient` but for the gradients.
        """
        hyper_params = self._acting(hyper_params)
        changed, values = changed_fields(self.built_with, hyper_params), field_values(hyper_params)
        schedules = {name: value for name, value in values.items() if callable(value)}
        resolved: dict[str, Any] = {}
        if schedules or changed or extra_args:
            resolved = ask(
                lambda update: update.schedule_values(changed, schedules),
                self,
                params,
                state,
                extra_args,
            )
        for name in values.keys() - schedules.keys():
            resolved[name] = jnp.asarray(values[name], float_dtype(values[name]))
        return dataclasses.replace(hyper_params, **resolved)

    def _overridable(self) -> str:
        return listed(overridable_in_general(self))

    def extra_arg_names(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that the transformation's `update` takes."""
        update = self.optax_optimizer.update
        asked = frozenset(name for name in names if not self._is_argument(name)) - _RESERVED
        if not asked:
            return asked
        taken = taken_keywords(update, asked)
        # What a line search does not take itself it passes on to its function.
        return asked if taken & _FUNCTIONS and takes_any_keyword(update) else taken

    def _is_argument(self, name: str) -> bool:
        """Whether a name is that of an argument of the constructor, and so not of the update."""
        is_structural = self.recipe is not None and self.recipe.has_argument(name)
        return is_structural or self.has_hyper_param(name)

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        """Returns the state dict in T5X's layout: containers without leaves vanish from `state`."""
        return {
            "target": to_state_dict(target),
            "state": to_state_dict(state, keep_empty=False),
        }

    def derive_logical_axes(self, optimizer: Optimizer, param_axes: Any) -> Optimizer:
        """Returns the optimizer with every leaf replaced by its logical axes.

        See `OptimizerDef.derive_logical_axes`. `param_axes` may also be anything else that
        `opt_partition.derive_logical_axes` takes; dicts and FrozenDicts are interchangeable.

        Raises:
          opt_partition.errors.AxesError: `param_axes` do not fit the parameters.
        """
        from opt_partition import normalise_param_axes  # the import takes 0.1 s

        axes = normalise_param_axes(optimizer.target, param_axes, pad=False)
        return super().derive_logical_axes(optimizer, axes)

    def describe_state(self, params: Any, state: OptimizerState) -> StateDescription:
        """Returns what every leaf of the state means; see `OptimizerDef.describe_state`.

        A table describes Optax's transformations, and functions, types and shapes others
        (`LeafDescription.source` is `'types'`). A transformation is named after the function or
        class that makes its state: `scale_by_adam` is `adam`. If no function tells, as with a
        `lambda` for `init`, it is named after the type of its state, or after its update function.

        Examples:
          >>> from opt_core import describe_state
          >>> optimizer = OptaxWrapper(optax.adam(0.1)).create({'w': jnp.ones(2)})
          >>> print(describe_state(optimizer))
          transformation  field  parameter  dims  role           source
          adam            count                   count          stated
          adam            mu     w          0     moment         stated
          adam            nu     w          0     second_moment  stated
          <BLANKLINE>
          adam: amsgrad=False, b1=0.9, b2=0.999, eps=1e-08, eps_root=0.0, mu_dtype=None,
              nesterov=False
          scale: step_size=-0.1
        """
        return describe_optax(self.optax_optimizer, params, state.param_states)

    def _identity(self) -> Any:
        return {k: v for k, v in super()._identity().items() if k not in _BUILT}

    def __reduce__(self) -> Any:
        # Attributes that a subclass added are stored too.
        attributes = {k: v for k, v in vars(self).items() if k not in _DERIVED}
        return _load, (type(self), dumps((self.recipe or self.optax_optimizer, attributes)))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # immutable

    def __repr__(self) -> str:
        content = self.hyper_params if self.recipe else self.optax_optimizer
        return f"{type(self).__name__}({content})"


def _strong(leaf: Any) -> Any:
    """A leaf as later updates return it: a JAX array without a weak type."""
    is_number = isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic)
    return strip_weak_type(jnp.array(leaf) if is_number else leaf)


def _load(cls: type[OptaxWrapper], data: bytes) -> OptaxWrapper:
    content, attributes = pickle.loads(data)  # noqa: S301
    self = cls.__new__(cls)
    if isinstance(content, Recipe):
        self._define(content.build(), content)
    else:
        self._define(content, None)
    vars(self).update(attributes)
    return self
