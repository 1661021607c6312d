"""Checkpoints in T5X's own layout: what the real T5X saved, in the folders that it makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.serialization
import golden_cases as g
import jax
import numpy as np
import pytest
import tensorstore as ts
from opt_checkpoint import open_foreign, plan_restore
from opt_core import Optimizer

CASES = {
    **dict.fromkeys(("t5x/adamw_1", "t5x/chain_clip_adam", "t5x/wrapper_multisteps"), g.WRAPPED),
    **dict.fromkeys(("t5x/lamb_1", "t5x_head/multi_transform_axes"), g.WRAPPED),
    **dict.fromkeys(("t5x/Multi_scan_rules", "t5x/Multi_two_adafactors"), g.GROUPS),
}


def folders(data: bytes, step: Path) -> Path:
    """What T5X's `Checkpointer` writes where every array has mesh axes."""
    step.mkdir()

    def write(node: Any, name: str) -> Any:
        if isinstance(node, dict):
            return {key: write(child, f"{name}.{key}".strip(".")) for key, child in node.items()}
        if node is None:
            return None
        array = np.asarray(node)
        spec: dict[str, Any] = {"driver": "zarr", "dtype": array.dtype.name}
        spec["metadata"] = {"shape": list(array.shape), "compressor": {"id": "gzip", "level": 1}}
        place = {"driver": "file", "path": f"{step / name}/"}
        ts.open({**spec, "kvstore": place}, create=True).result().write(array).result()
        return {**spec, "kvstore": {"driver": "gfile", "path": f"{name}/"}}

    contents: Any = flax.serialization.msgpack_restore(data)
    index = {**contents, "optimizer": write(contents["optimizer"], "")}
    (step / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(index))
    return step


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_what_t5x_saved_continues(name: str, tmp_path: Path) -> None:
    case = g.load(name, CASES[name])
    definition = g.build(case.spec, g.OURS)
    if CASES[name] == g.GROUPS:
        definition.set_param_axes(case.param_axes)

    def create() -> Optimizer:
        optimizer: Optimizer = definition.create(case.params)
        return optimizer

    data = (g.FOLDER / case.index["checkpoint"]["file"]).read_bytes()
    path = folders(data, tmp_path / "checkpoint_10")
    source = open_foreign(path, written_by=jax.eval_shape(create))
    plan = plan_restore(source, jax.eval_shape(create))
    assert plan.is_exact, str(plan)
    restored = plan.apply()
    recorded = g.entry(case, len(case.grads))
    recorded = {p: v for p, v in recorded.items() if not p.startswith("flax_mutables/")}
    assert g.deviations(g.flatten(restored.state_dict()), recorded, g.EXACT) == []
