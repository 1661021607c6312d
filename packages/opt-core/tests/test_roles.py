"""What the roles of a state cost; what they say is tested with groups and state dicts."""

from typing import Any

import numpy as np
import pytest
from opt_core import roles
from opt_core._paths import children


def opened(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many entries of containers are looked at, for slots in the places of their leaves."""
    params = {f"layer_{i}": {"w": np.ones((2, 3)), "b": np.ones(3)} for i in range(count)}
    states = {
        name: {k: {"row": np.ones(2), "column": np.ones(3)} for k in layer}
        for name, layer in params.items()
    }
    seen = 0

    def counted(node: Any) -> Any:
        nonlocal seen
        found = children(node)
        seen += len(found.children) if found is not None else 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr("opt_core._description.roles.children", counted)
        assert len(roles(params, states)) == 4 * count
    return seen


def test_twice_the_parameters_are_twice_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(200, monkeypatch) < 2.1 * opened(100, monkeypatch)
