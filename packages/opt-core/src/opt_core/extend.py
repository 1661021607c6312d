"""What packages that build on opt-core use of it; may change with any release, as `jax.extend`."""

from opt_core._description.follow import (
    StateLeaf,
    around,
    is_placeholder,
    leaves_of,
    on_placeholders,
    placeholders,
    places,
)

__all__ = [
    "StateLeaf",
    "around",
    "is_placeholder",
    "leaves_of",
    "on_placeholders",
    "placeholders",
    "places",
]
