"""One transformation to build, and what many of them are built with."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Much of what they export is not an explicit export, which mypy asks for.
optax: Any = importlib.import_module("optax")
contrib: Any = importlib.import_module("optax.contrib")
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


def always(make: Callable[[], Transformation], **options: Any) -> Case:
    """A case whose transformation does not depend on the parameters."""
    return Case(lambda _: make(), **options)


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
