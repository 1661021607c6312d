"""Pytrees as nested dicts with string keys, as in Flax and T5X, and back with every deviation.

Each level of the pytree is one level of the dict. Keys are not joined, so they may contain `/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from opt_core._trees import (
    children,
    committed_sharding,
    convert_held,
    held_dtype,
    path_str,
    strip_weak_type,
)
from opt_core.errors import RestoreError, StateDictError

_ABSENT: Any = object()
_LISTED_KEYS = 20
_TOO_DEEP = "the tree is nested too deeply for Python: some 300 levels are possible"
_SCALARS = (bool, int, float, complex)

Kind: TypeAlias = Literal["missing", "extra", "container", "shape", "dtype", "value"]


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """One deviation of a state dict from the reference.

    Attributes:
      path: `/`-joined names from the root of the state dict.
      kind: how it deviates: `'missing'`, `'extra'`, `'container'`, `'shape'`, `'dtype'`, `'value'`.
      expected: the value in the reference, as text.
      found: the value in the state dict, as text.
    """

    path: str
    kind: Kind
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: expected {self.expected}, found {self.found}"


def to_state_dict(tree: Any, *, keep_empty: bool = True) -> Any:
    """Returns `tree` as nested plain dicts.

    Args:
      tree: any pytree.
      keep_empty: whether containers without leaves stay as `{}`. T5X drops them from the state of
        Optax optimizers.

    Returns:
      A dict, or the leaf itself where `tree` is one. Leaves are passed through, but typed PRNG
      keys become their uint32 data. `None` is kept.

    Raises:
      StateDictError: two keys of one container have the same name, or the tree is nested too
        deeply.

    Examples:
      >>> to_state_dict({'w': 1.0, 'layers': [(2.0,), ()]})
      {'layers': {'0': {'0': 2.0}, '1': {}}, 'w': 1.0}
      >>> to_state_dict({'w': 1.0, 'layers': [(2.0,), ()]}, keep_empty=False)
      {'layers': {'0': {'0': 2.0}}, 'w': 1.0}
    """
    try:
        return _write(tree, (), keep_empty)
    except RecursionError:
        raise StateDictError(_TOO_DEEP) from None


def _write(tree: Any, names: tuple[str, ...], keep_empty: bool) -> Any:
    node = children(tree)
    if node is None:
        return _key_data(tree) if _is_key(tree) else tree
    result: dict[str, Any] = {}
    for name, child in node.children:
        if name in result:
            raise StateDictError(
                f"`{path_str(names)}` has two keys named {name!r} (of type "
                f"{' and '.join(sorted({type(k).__name__ for k in tree}))}); a state dict has "
                "string keys only: rename one"
            )
        written = _write(child, (*names, name), keep_empty)
        if keep_empty or not isinstance(written, dict) or written:
            result[name] = written
    return result


def restore_state_dict(reference: Any, state_dict: Any) -> Any:
    """Returns `reference` with the leaves of `state_dict`.

    The reference decides containers, shapes and dtypes. Empty containers and leaves that are `None`
    may be absent. A Python number fits a scalar of its kind. NumPy arrays are copied. An array
    moves to the devices of the reference leaf if that is committed; a JAX array that is there
    already is used as is.

    Dtypes are compared as JAX holds them: without `jax_enable_x64` a float64 array of NumPy fits
    float32, and is rounded. If a value does not survive that (an integer out of range, a number
    that becomes infinite or 0), the leaf deviates.

    Args:
      reference: any pytree; leaves may be arrays, tracers or `jax.ShapeDtypeStruct` leaves.
      state_dict: nested mappings.

    Raises:
      RestoreError: the state dict does not fit; lists every deviation.
      StateDictError: the trees are nested too deeply.

    Examples:
      >>> restore_state_dict({'w': np.zeros(2)}, {'w': np.ones(2)})['w'].tolist()
      [1.0, 1.0]
    """
    reader = _Reader()
    try:
        restored = reader.read(reference, state_dict, ())
    except RecursionError:
        raise StateDictError(_TOO_DEEP) from None
    if reader.mismatches:
        raise RestoreError(reader.mismatches)
    return restored


class _Reader:
    """One walk over a reference and a state dict."""

    def __init__(self) -> None:
        self.mismatches: list[Mismatch] = []

    def _note(self, names: tuple[str, ...], kind: Kind, want: str, got: str) -> None:
        self.mismatches.append(Mismatch(path_str(names), kind, want, got))

    def read(self, reference: Any, value: Any, names: tuple[str, ...]) -> Any:
        node = children(reference)
        if node is None:
            return self._leaf(reference, value, names)
        if value is _ABSENT:
            value = {}
        if not isinstance(value, Mapping):
            names_in = _keys(name for name, _ in node.children)
            want = f"a mapping ({type(reference).__name__}) with {names_in}"
            self._note(names, "container", want, _describe(value))
            return reference
        entries = {str(key): child for key, child in value.items()}
        if len(entries) < len(value):
            want = "keys with different names"
            self._note(names, "container", want, _keys(map(repr, value)))
            return reference
        restored = [
            self.read(child, entries.pop(name, _ABSENT), (*names, name))
            for name, child in node.children
        ]
        for name, child in entries.items():
            self._extra(child, (*names, name))
        return node.rebuild(restored)

    def _extra(self, value: Any, names: tuple[str, ...]) -> None:
        if isinstance(value, Mapping) and value:
            for name, child in value.items():
                self._extra(child, (*names, str(name)))
        else:
            self._note(names, "extra", "nothing", _describe(value))

    def _leaf(self, reference: Any, value: Any, names: tuple[str, ...]) -> Any:
        if value is _ABSENT and reference is not None:
            self._note(names, "missing", _describe(reference), "nothing")
            return reference
        if reference is None:
            restored, deviation = _fit_none(value)
        elif isinstance(value, Mapping):
            restored, deviation = None, ("container", _describe(value))
        elif _is_array(reference):
            restored, deviation = _fit_array(reference, value)
        else:
            restored, deviation = _fit_other(reference, value)
        if deviation is not None:
            self._note(names, deviation[0], _describe(reference), deviation[1])
        return restored


_Fit = tuple[Any, tuple[Kind, str] | None]


def _fit_none(value: Any) -> _Fit:
    if value is None or value is _ABSENT:
        return None, None
    return None, ("value", _describe(value))


def _fit_other(reference: Any, value: Any) -> _Fit:
    """Python numbers, strings, partition specs: the same type, or a NumPy scalar of its kind."""
    if type(value) is type(reference):
        return value, None
    if isinstance(reference, _SCALARS) and _is_array(value) and np.shape(value) == ():
        if isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct):
            return value, None
        item = np.asarray(value).item()
        if type(item) is type(reference):
            return item, None
    return None, ("value", _describe(value))


def _fit_array(reference: Any, value: Any) -> _Fit:
    if not _is_array(value):
        return _fit_scalar(reference, value)
    if not _is_abstract(reference) and hasattr(value, "__array__") and not _is_known(value):
        value = np.asarray(value)  # a lazy array of a checkpoint library
    if problem := _problem(reference, value):
        return None, ("value", problem)
    wanted = reference
    if _is_key(reference) and not _is_key(value):
        wanted = jax.eval_shape(jax.random.key_data, _abstract(reference))
    if tuple(value.shape) != tuple(wanted.shape):
        return None, ("shape", _describe(value))
    if held_dtype(value) != held_dtype(wanted):
        return None, ("dtype", _describe_held(wanted, value))
    value, problem = _as_held(wanted, value)
    if problem:
        return None, ("value", problem)
    if wanted is not reference:
        return _wrap_key(reference, value), None
    return _place(reference, value), None


def _as_held(wanted: Any, value: Any) -> tuple[Any, str]:
    """The value in the expected dtype, which differs at most in 32 or 64 bits."""
    # An array of NumPy stays one, in its own dtype; anything else becomes an array of JAX.
    dtype = wanted.dtype if isinstance(wanted, np.ndarray | np.generic) else held_dtype(wanted)
    if value.dtype == dtype:
        return value, ""
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.update(dtype=dtype), ""
    if not _is_known(value):
        return value, ""
    converted, lost = convert_held(np.asarray(value), dtype)
    return (
        converted,
        "" if lost is None else f"{_describe(value)} with {lost}, which does not fit {dtype}",
    )


def _describe_held(wanted: Any, value: Any) -> str:
    if value.dtype != wanted.dtype:
        return _describe(value)
    return f"{_describe(value)}, which JAX makes {held_dtype(value)} without `jax_enable_x64`"


def _problem(reference: Any, value: Any) -> str:
    """Why an array cannot be restored, whatever its shape; empty if it can."""
    if isinstance(value, np.ma.MaskedArray):
        return "a masked array"
    if isinstance(value, jax.Array) and not _is_abstract(value) and value.is_deleted():
        return "a deleted array (was it donated?)"
    if not _is_abstract(reference) and not _is_known(value):
        return f"an abstract array ({type(value).__name__})"
    return ""


def _is_known(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | jax.Array)


def _is_abstract(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer) or not _is_known(value)


def _fit_scalar(reference: Any, value: Any) -> _Fit:
    dtype = reference.dtype
    kinds = {bool: np.bool_, int: np.integer, float: jnp.floating, complex: jnp.complexfloating}
    kind = kinds.get(type(value))
    if kind is None or reference.shape != () or not jnp.issubdtype(dtype, kind):
        return None, ("value", _describe(value))
    if not _is_in_range(value, dtype):
        return None, ("value", f"{value}, which does not fit {dtype}")
    return _place(reference, np.asarray(value, dtype)), None


def _is_in_range(value: Any, dtype: Any) -> bool:
    if jnp.issubdtype(dtype, np.integer):
        return bool(jnp.iinfo(dtype).min <= value <= jnp.iinfo(dtype).max)
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.asarray(value, dtype)) or not np.isfinite(value))


def _place(reference: Any, value: Any) -> Any:
    """The value as a separate array, placed like the reference."""
    sharding = committed_sharding(reference)
    if isinstance(value, jax.Array):
        if sharding is not None and not _is_abstract(value):
            is_there = value.sharding.is_equivalent_to(sharding, value.ndim)
            value = value if is_there else jax.device_put(value, sharding)
        return value if getattr(reference, "weak_type", False) else strip_weak_type(value)
    if not _is_known(value):
        return value  # as abstract as the reference
    copy = np.array(value)
    if isinstance(reference, np.ndarray | np.generic):
        return copy
    return jnp.array(copy) if sharding is None else jax.device_put(copy, sharding)


def _is_array(value: Any) -> bool:
    is_instance = not isinstance(value, type) and hasattr(value, "dtype")
    return is_instance and isinstance(getattr(value, "shape", None), tuple)


def _abstract(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _is_key(value: Any) -> bool:
    return _is_array(value) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _key_data(key: Any) -> Any:
    if isinstance(key, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, key)
    return jax.random.key_data(key)


def _key_impl(reference: Any) -> Any:
    impls: list[Any] = []  # an abstract key tells its implementation only while tracing
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), _abstract(reference))
    return impls[0]


def _wrap_key(reference: Any, data: Any) -> Any:
    if isinstance(data, jax.ShapeDtypeStruct):
        return reference
    key = jax.random.wrap_key_data(jnp.array(data), impl=_key_impl(reference))
    sharding = committed_sharding(reference)
    return key if sharding is None else jax.device_put(key, sharding)


def _keys(names: Any) -> str:
    names = list(names)
    if len(names) > _LISTED_KEYS:
        names = [*names[:_LISTED_KEYS], f"... ({len(names)} in all)"]
    return "keys " + ", ".join(names) if names else "no keys"


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with {_keys(map(str, value))}"
    if _is_array(value):
        return f"{value.dtype}{list(value.shape)}"
    if value is None or isinstance(value, _SCALARS):
        return f"{value!r} ({type(value).__name__})" if value is not None else "None"
    return f"a {type(value).__name__}"
