"""Whose state it is: what a file says so that another optimizer does not take it for its own.

Several optimizers keep as many arrays of the same shapes: a state of `adam` fits `adamax`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from opt_legacy_stax._trees import shown

if TYPE_CHECKING:
    from opt_legacy_stax._optimizers import Optimizer

# What each of the nine keeps for a parameter, in order.
_KEEPS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("x",),
    "momentum": ("x", "velocity"),
    "nesterov": ("x", "velocity"),
    "adagrad": ("x", "g_sq", "m"),
    "rmsprop": ("x", "avg_sq_grad"),
    "rmsprop_momentum": ("x", "avg_sq_grad", "mom"),
    "adam": ("x", "m", "v"),
    "adamax": ("x", "m", "u"),
    "sm3": ("x", "m", "vs", "shape"),
}
# JAX's own triples have no attribute that says so; their functions are those of these modules.
_MODULES = ("opt_legacy_stax._triples", "jax.example_libraries.optimizers")
_ATTRIBUTE = "_opt_legacy_stax_identity"


class HasTriple(Protocol):
    """What `to_optax`, `to_optimizer_def` and `optax_equivalent` return."""

    @property
    def triple(self) -> Optimizer:
        """The triple it was made of."""


class Identity(NamedTuple):
    """The name of an optimizer, and the meaning of what it keeps.

    Attributes:
      name: of the function that makes it.
      keeps: the name of each entry kept for a parameter; empty where only the name is known.
    """

    name: str
    keeps: tuple[str, ...] = ()

    def __str__(self) -> str:
        fields = f", which keeps ({shown(', '.join(self.keeps))})" if self.keeps else ""
        return f"`{shown(self.name)}`{fields}"


def made_by(opt_maker: Callable[..., Any]) -> Identity | None:
    """Returns whose states an optimizer has that a function makes; `None` for a lambda.

    Examples:
      >>> from opt_legacy_stax import _triples
      >>> print(made_by(_triples.momentum))
      `momentum`, which keeps (x, velocity)
    """
    name = getattr(opt_maker, "__name__", "<unknown>")
    if not name.isidentifier():
        return None
    is_known = getattr(opt_maker, "__module__", None) in _MODULES
    return Identity(name, _KEEPS.get(name, ()) if is_known else ())


def mark(init_fn: Callable[..., Any], identity: Identity | None) -> None:
    """Notes whose states a function makes; wrappers of it, as of `jax.jit`, have the note too."""
    setattr(init_fn, _ATTRIBUTE, identity)


def identity_of(optimizer: Any) -> Identity | None:
    """Returns whose state is meant.

    Args:
      optimizer: a triple; something that has one as its `triple`; or a name.

    Returns:
      `None` for a triple that does not say.

    Raises:
      TypeError: it is none of these, or an empty name.

    Examples:
      >>> from opt_legacy_stax import adam
      >>> identity_of(adam(0.1)) == identity_of('adam')
      True
    """
    if isinstance(optimizer, str) and optimizer:
        return Identity(optimizer, _KEEPS.get(optimizer, ()))
    init_fn = triple_of(optimizer)[0]
    marked: Identity | None = getattr(init_fn, _ATTRIBUTE, None)
    if marked is not None or getattr(init_fn, "__module__", None) not in _MODULES:
        return marked
    name = getattr(init_fn, "__qualname__", "").partition(".")[0]
    return Identity(name, _KEEPS[name]) if name in _KEEPS else None


def triple_of(optimizer: Any, argument: str = "optimizer") -> Any:
    """Returns the triple that is meant.

    Args:
      optimizer: a triple, or something that has one as its `triple`.
      argument: what the error calls it.

    Raises:
      TypeError: there is none.
    """
    triple = getattr(optimizer, "triple", optimizer)
    if isinstance(triple, tuple) and len(triple) == 3 and all(map(callable, triple)):
        return triple
    or_name = ", or a name that is not empty" if argument == "optimizer" else ""
    raise TypeError(
        f"`{argument}` must be a triple (init_fn, update_fn, params_fn), or what `to_optax`, "
        f"`to_optimizer_def` or `optax_equivalent` made of one{or_name}; got "
        f"{shown(repr(optimizer), 60)}."
    )
