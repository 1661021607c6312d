"""Copies and pickles of what lies on a mesh: devices belong to a process and are never copied."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Self

from jax.sharding import AbstractMesh

from opt_partition._mesh.specs import AnyMesh


class OnMesh:
    """A base of frozen dataclasses with the field `mesh`.

    Copies share the mesh. Pickles have an `AbstractMesh` of the same axes in its place, since
    devices cannot be pickled and another process has others.
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
    """The values of all fields of a dataclass, in their order."""
    return [getattr(instance, field.name) for field in dataclasses.fields(instance)]


def _abstract(mesh: AnyMesh) -> AbstractMesh:
    """The axes of a mesh without its devices."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)
