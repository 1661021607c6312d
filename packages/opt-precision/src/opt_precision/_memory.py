"""State on the host: which arrays lie there, and the ways there and back."""

from __future__ import annotations

from typing import Any, Final

import jax

Space = jax.memory.Space
KINDS: Final = ("pinned_host",)


def is_on_host(array: Any) -> bool:
    """Whether an array lies in the memory of the host, as its type says."""
    return bool(jax.typeof(array).memory_space == Space.Host)


def fetched(array: jax.Array) -> jax.Array:
    """An array on the device."""
    return jax.device_put(array, Space.Device) if is_on_host(array) else array


def placed_like(array: jax.Array, like: jax.Array) -> jax.Array:
    """An array in the memory in which another lies."""
    return jax.device_put(array, Space.Host) if is_on_host(like) else array


def on_host(array: jax.Array) -> jax.Array:
    """A new array of a state in the memory of the host, on the devices on which it lies."""
    is_traced = isinstance(array, jax.core.Tracer)
    place: Any = Space.Host if is_traced else array.sharding.with_memory_kind("pinned_host")
    moved: jax.Array = jax.device_put(array, place)
    return moved
