"""Copying and pickling of objects with a mesh, whose devices belong to a process."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Self

from jax.sharding import AbstractMesh

from opt_partition._mesh.specs import AnyMesh


class OnMesh:
    """Base class of frozen dataclasses with the field `mesh`.

    Copies share the mesh. Pickles contain an `AbstractMesh` with the same axes instead, since
    devices cannot be pickled and differ between processes.
    """

    mesh: AnyMesh

    def __copy__(self) -> Self:
        return type(self)(*_values(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.mesh)] = self.mesh
        return type(self)(*copy.deepcopy(_values(self), memo))

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), tuple(
            _abstract(value) if value is self.mesh else value for value in _values(self)
        )


def _values(instance: Any) -> list[Any]:
    """Returns the values of all fields of a dataclass, in order."""
    return [getattr(instance, field.name) for field in dataclasses.fields(instance)]


def _abstract(mesh: AnyMesh) -> AbstractMesh:
    """Returns an abstract mesh with the axes of `mesh`."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)
