"""The differences between a state dict and the optimizer to restore."""

from __future__ import annotations

import dataclasses
import enum


class MismatchKind(enum.Enum):
    """How a path of a state dict deviates from the reference."""

    MISSING = "missing"
    EXTRA = "extra"
    CONTAINER = "container"
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUE = "value"


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """One deviation.

    Attributes:
      path: `/`-joined names from the root of the state dict.
      kind: how it deviates.
      expected: the value in the reference, as text.
      found: the value in the state dict, as text.
    """

    path: str
    kind: MismatchKind
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind.value}: expected {self.expected}, found {self.found}"


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """Every deviation of a state dict from the reference it is restored into.

    Attributes:
      mismatches: in the order of the reference, extra paths after their siblings.
      matched: number of leaves that fit.
      state_matched: number of those that belong to the optimizer's own state, without `step`.
    """

    mismatches: tuple[Mismatch, ...]
    matched: int
    state_matched: int = 0

    @property
    def ok(self) -> bool:
        """Whether the state dict fits exactly."""
        return not self.mismatches

    @property
    def _is_other_optimizer(self) -> bool:
        kinds = {m.kind for m in self.mismatches if m.path.startswith("state/param_states")}
        same_layout = kinds <= {MismatchKind.SHAPE, MismatchKind.DTYPE}
        return not same_layout and not self.state_matched

    def __str__(self) -> str:
        if self.ok:
            return f"the state dict fits: {self.matched} leaves"
        n = len(self.mismatches)
        head = f"the state dict does not fit the optimizer: {n} deviation{'s' * (n > 1)}"
        if self._is_other_optimizer:
            head += "; nothing under `state/param_states` fits: another optimizer's state, or none"
        advice = (
            "Restore into an optimizer built as the saved one was, correct the dict, or pass "
            "`strict=False` to take the "
            f"{self.matched} leaves that fit and keep the rest as they are."
        )
        return "\n".join([head, *(f"  {m}" for m in self.mismatches), advice])
