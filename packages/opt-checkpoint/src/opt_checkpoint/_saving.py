"""What one step writes: arrays for Orbax, and a manifest with a digest of each."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from opt_core import describe_state
from opt_core.extend import (
    LeafInfo,
    NamedState,
    Names,
    Schema,
    View,
    count_of,
    named_leaves,
    named_view,
    shown,
)

from opt_checkpoint import _digest
from opt_checkpoint._manifest import (
    DTYPES,
    EXTRA,
    PYTHON,
    encode,
    encode_schema,
    encode_step,
    is_scalar,
    is_stored,
    nest,
    store_key,
    structure_of,
)
from opt_checkpoint._processes import are_equal
from opt_checkpoint._targets import view_of
from opt_checkpoint.errors import LeafError

_log = logging.getLogger(__name__)
_MAX_BITS = 14_284  # of 4,300 digits


class Layout:
    """What all steps of one structure share, computed once: it takes a third of a save.

    `source` is what the schema was made from: the same object has the same structure. `rest` is
    what else it depends on.
    """

    def __init__(self, schema: Schema, source: object = None, rest: object = None) -> None:
        self.schema, self.source, self.rest = schema, source, rest
        if len(schema.by_name) != len(schema.leaves):
            raise LeafError("`schema` has a name twice")
        self.text = encode_schema(schema)
        stored = list(filter(is_stored, schema.leaves))
        self.stored = [leaf.name for leaf in stored]
        self.keys = [store_key(leaf.path) for leaf in stored]


@dataclasses.dataclass(frozen=True)
class Saving:
    """One step on its way to the disk.

    Attributes:
      layout: what its leaves are.
      step: what the manifest says of this step alone, as JSON.
      arrays: to be stored, in the order of `layout.stored`.
      tree: the arrays as a nested dictionary, by the keys of the store.
      digests: of them.
    """

    layout: Layout
    step: bytes
    arrays: Sequence[Any]
    tree: Mapping[str, Any]
    digests: _digest.Digests

    @classmethod
    def prepare(
        cls,
        step: int | None,
        target: Any,
        extras: Any = None,
        metadata: Any = None,
        previous: Layout | None = None,
    ) -> Saving:
        """Decides how every leaf is stored, and captures its bits.

        A step of `None`, of an item that `OptimizerHandler` saves, is that of the state, or 0.
        `previous`, the layout of the step before, is used again if it is the same. A `LeafError`
        says what cannot be saved.
        """
        infos, extra_values = _extra_leaves(extras)
        if isinstance(target, NamedState):
            layout, values = _of_named(target, infos)
        else:
            view = view_of(target)
            _warn_unsaved(target, view.unsaved, extras, is_item=step is None)
            layout, values = _of_view(view, infos, previous)
        values += extra_values
        kept: dict[str, Any] = {}
        impls: dict[str, str] = {}
        arrays = []
        for info, leaf in zip(layout.schema.leaves, values, strict=True):
            array = _to_store(info, leaf)
            if info.dtype == PYTHON:
                kept[info.name] = leaf
            elif info.value is not None:
                kept[info.name] = count_of(leaf)
            if info.is_key:
                impls[info.name] = str(jax.random.key_impl(leaf))
            if is_stored(info):
                arrays.append(_to_save(array))
        number = int(kept.get("state/step", 0)) if step is None else step
        text = encode_step(number, metadata, kept, impls, structure_of(extras))
        tree = nest(dict(zip(layout.keys, arrays, strict=True)))
        if jax.process_count() > 1:
            # What follows communicates: on CPU, Gloo's collectives of several programs can
            # deadlock. The arrays are copied next anyway.
            jax.block_until_ready(arrays)
        return cls(layout, text, arrays, tree, _digest.Digests(arrays))

    def sums(self) -> _digest.Sums:
        """Waits for the digests; returns what this process contributes to the sums of all."""
        sums = self.digests.sums()
        if jax.process_index() > 0:
            sums[np.setdiff1d(np.arange(len(sums)), self.digests.partial)] = 0
        return sums

    def encode(self, sums: _digest.Sums) -> bytes:
        """Returns the manifest's bytes; the sums are those of all processes together."""
        digests: dict[str, str | None] = dict.fromkeys(self.layout.schema.by_name)
        for name, pair in zip(self.layout.stored, sums, strict=True):
            digests[name] = _digest.bound(name, _digest.to_hex(pair))
        return encode(self.layout.text, self.step, [*digests.values()])

    def check_equal(self, where: str) -> None:
        """Raises a `LeafError` unless all processes have the same manifest; all must call it."""
        if jax.process_count() == 1:
            return
        local = [array for array in self.arrays if isinstance(array, np.ndarray)]
        if not are_equal(self.layout.text + self.step + _digest.Digests(local).sums().tobytes()):
            raise LeafError(
                f"{where}: the processes would save different things: the schema, scalars and "
                "local arrays must be equal in all. Save what differs as one global array"
            )


def _warn_unsaved(target: Any, unsaved: Sequence[str], extras: Any, *, is_item: bool) -> None:
    saved = extras if isinstance(extras, Mapping) else {}
    if missing := [name for name in unsaved if name not in saved]:
        fields = ", ".join(f"{name!r}: state.{name}" for name in missing)
        _log.warning(
            "%s: `%s` is not saved, because it is not the optimizer's: %s",
            *(type(target).__name__, "`, `".join(missing)),
            "save it as another item" if is_item else f"give `extras={{{fields}}}`",
        )


def _extra_leaves(extras: Any) -> tuple[list[LeafInfo], list[Any]]:
    """The leaves of a pytree and what they are, under `extra/`."""
    try:
        flat = named_leaves(extras)
    except (TypeError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise LeafError(f"`extras`: expected a pytree of named leaves: {text}") from error
    infos = [_extra_info((EXTRA, *path), leaf) for path, leaf in flat]
    return infos, [leaf for _, leaf in flat]


def _extra_info(path: Names, leaf: Any) -> LeafInfo:
    if is_scalar(leaf):
        return LeafInfo(path, (), PYTHON, EXTRA)
    if isinstance(leaf, np.generic | np.ndarray) or hasattr(leaf, "dtype"):
        return LeafInfo(path, tuple(np.shape(leaf)), str(leaf.dtype), EXTRA)
    expected = "an array, a typed PRNG key or a Python scalar"
    raise LeafError(f"`{'/'.join(path)}`: expected {expected}, found {type(leaf).__name__}")


def _of_named(named: NamedState, infos: list[LeafInfo]) -> tuple[Layout, list[Any]]:
    leaves = named.schema.leaves
    layout = Layout(dataclasses.replace(named.schema, leaves=(*leaves, *infos)))
    if odd := named.schema.by_name.keys() ^ named.keys():
        raise LeafError(f"`schema` and leaves differ: {sorted(odd)[:3]}")
    return layout, [named[leaf.name] for leaf in leaves]


def _of_view(
    view: View, infos: list[LeafInfo], previous: Layout | None
) -> tuple[Layout, list[Any]]:
    optimizer, rest = view.optimizer, view.others
    # the same object for equal definitions and structures
    source = describe_state(optimizer)
    scalars = [*jax.tree.leaves(optimizer.state.step), *rest.values()]
    depends = [(np.shape(x), getattr(x, "dtype", type(x))) for x in scalars], list(rest), infos
    layout = previous
    if layout is None or layout.source is not source or layout.rest != depends:
        schema = named_view(view).schema
        schema = dataclasses.replace(schema, leaves=(*schema.leaves, *infos))
        layout = Layout(schema, source, depends)
    params, state = jax.tree.leaves(optimizer.target), jax.tree.leaves(optimizer.state)
    return layout, [*params, *rest.values(), *state]


def _to_store(info: LeafInfo, leaf: Any) -> Any:
    """The array to store for a leaf; a `LeafError` says why it cannot be saved."""
    if info.dtype == PYTHON:
        if type(leaf) is int and leaf.bit_length() > _MAX_BITS:
            raise LeafError(f"`{info.name}`: Python could not read so many digits again")
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        raise LeafError(f"`{info.name}`: expected an array, found `{leaf}`, which has no value")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise LeafError(
            f"`{info.name}`: the array has been donated or deleted: save it before the step that "
            "donates it"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise LeafError(f"`{info.name}`: a masked array loses its mask. Save `.data` and `.mask`")
    if info.is_key:
        if not isinstance(jax.random.key_impl(leaf), str):
            raise LeafError(
                f"`{info.name}`: this type of PRNG keys has no name: register it, or save "
                "`jax.random.key_data`"
            )
        return jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array | np.ndarray):
        leaf = np.asarray(leaf, dtype=info.dtype if info.dtype in DTYPES else None)
    dtype = _dtype_name(leaf.dtype)
    if dtype not in DTYPES:
        raise LeafError(
            f"`{info.name}`: {dtype} cannot be saved. Convert it, or keep it out of the state. "
            f"These can: {', '.join(sorted(DTYPES))}, and typed PRNG keys"
        )
    if (tuple(leaf.shape), dtype) != (info.shape, info.dtype):
        raise LeafError(
            f"`{info.name}`: expected {shown(info)} as the schema says, found {shown(leaf)}"
        )
    # a copy: the caller may write to it later
    return np.array(leaf, order="C") if isinstance(leaf, np.ndarray) else leaf


@functools.cache  # NumPy makes these names anew every time
def _dtype_name(dtype: Any) -> str:
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def _to_save(array: Any) -> Any:
    """With several processes, an array that each of them holds is saved by the first."""
    if isinstance(array, jax.Array) and jax.process_count() > 1 and array.is_fully_addressable:
        return np.asarray(array)
    return array
