"""The identity of an optimizer, saved with its states: without it, `adam`'s fit `adamax`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from opt_legacy_stax._trees import shown

# The entries that each of the nine optimizers keeps for a parameter, in order.
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
# of an `init_fn`; wrappers such as `jax.jit` carry it along
ATTRIBUTE = "_opt_legacy_stax_identity"


class Identity(NamedTuple):
    """The name of the function that creates an optimizer, and of the entries in its state."""

    name: str
    keeps: tuple[str, ...] = ()  # empty if they are not known

    def __str__(self) -> str:
        fields = f", which keeps ({shown(', '.join(self.keeps))})" if self.keeps else ""
        return f"`{shown(self.name)}`{fields}"


def identity_of_maker(opt_maker: Callable[..., Any]) -> Identity | None:
    """Returns the identity of the optimizers that a function creates; `None` for a lambda."""
    name = getattr(opt_maker, "__name__", "<unknown>")
    if not name.isidentifier():
        return None
    is_known = getattr(opt_maker, "__module__", None) == "opt_legacy_stax._triples"
    return Identity(name, _KEEPS.get(name, ()) if is_known else ())


def identity_of(optimizer: Any) -> Identity | None:
    """Returns the identity of an optimizer."""
    if isinstance(optimizer, str) and optimizer:
        return Identity(optimizer, _KEEPS.get(optimizer, ()))
    identity: Identity | None = getattr(triple_of(optimizer)[0], ATTRIBUTE, None)
    return identity


def triple_of(optimizer: Any, argument: str = "optimizer") -> Any:
    """Returns a triple, unwrapped if necessary."""
    triple = getattr(optimizer, "triple", optimizer)
    if isinstance(triple, tuple) and len(triple) == 3 and all(map(callable, triple)):
        return triple
    or_name = ", or a non-empty name" if argument == "optimizer" else ""
    raise TypeError(
        f"`{argument}` must be a triple (init_fn, update_fn, params_fn), or a triple wrapped by "
        f"`to_optax`, `to_optimizer_def` or `optax_equivalent`{or_name}; got "
        f"{shown(repr(optimizer), 60)}."
    )
