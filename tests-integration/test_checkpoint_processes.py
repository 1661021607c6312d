"""A checkpoint that two processes write and read, each its own share.

Run as a program with a port and the number of a process, it is one of the two.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kills import free_port

TX = optax.adam(0.1)
LOCAL_DEVICES = 2


def values(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "split": rng.standard_normal((8, 512, 16)).astype(np.float32),
        "split_within": rng.standard_normal((6, 8)).astype(np.float32),
        "whole": rng.standard_normal(5).astype(np.float32),
    }


SPECS = {
    "split": PartitionSpec("x"),
    "split_within": PartitionSpec(None, "x"),
    "whole": PartitionSpec(),
}


def flip(root: Path, step: int) -> None:
    """Flips a bit of the largest array."""
    path = max((root / str(step)).glob("leaves/**/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def member(root: Path) -> dict[str, Any]:
    """What one of the processes does and finds."""
    from jax.experimental import multihost_utils
    from opt_checkpoint import Checkpointer, TrainingState
    from opt_checkpoint._disk import orbax as _orbax
    from opt_checkpoint.errors import LeafError

    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))

    def state(step: int) -> TrainingState:
        params = {
            name: jax.make_array_from_callback(
                value.shape, NamedSharding(mesh, SPECS[name]), value.__getitem__
            )
            for name, value in values(step).items()
        }
        places = optax.tree.map_params(
            TX,
            lambda _, param: param.sharding,
            jax.eval_shape(TX.init, params),
            params,
            transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
        )
        return TrainingState(TX, params, jax.jit(TX.init, out_shardings=places)(params), step)

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage().split(":")[0])  # type: ignore[method-assign]
    logging.getLogger("opt_checkpoint").addHandler(handler)
    logging.getLogger("absl").setLevel(logging.CRITICAL)

    found: dict[str, Any] = {}
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            noise = np.arange(3.0)
            checkpointer.save(step, state(step), extras={"position": step, "noise": noise})
        checkpointer.wait()
        try:
            checkpointer.save(4, state(4), extras={"position": jax.process_index()})
        except LeafError as error:
            found["different"] = str(error)
        checkpointer.wait()
    if jax.process_index() == 0:
        flip(root, 3)
    multihost_utils.sync_global_devices("damaged")

    shares: list[float] = []
    restore_arrays = _orbax.restore_arrays

    def counted(folder: Path, item: Any, restore_args: Any) -> Any:
        tree = restore_arrays(folder, item, restore_args)
        for leaf in jax.tree.leaves(tree):
            if leaf.shape == (8, 512, 16):
                shares.append(sum(s.data.size for s in leaf.addressable_shards) / leaf.size)
        return tree

    _orbax.restore_arrays = counted
    reader = Checkpointer(root, read_only=True)
    restored = reader.restore_latest(state(0))
    found["restored_step"] = reader.restored_step
    found["warnings"] = list(warnings)
    found["is_exact"] = all(
        (np.asarray(shard.data) == values(2)[name][shard.index]).all()
        for name, leaf in restored.params.items()
        for shard in leaf.addressable_shards
    )
    found["shares"] = sorted(set(shares))
    shares.clear()
    reports = [reader.validate(step, level="digests") for step in (1, 2, 3)]
    found["ok"] = [report.ok for report in reports]
    found["error"] = reports[2].error
    found["shares_of_validation"] = sorted(set(shares))
    latest = reader.latest_valid(level="digests")
    found["latest_valid"] = latest and latest.step
    return found


def main(port: str, number: str, root: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", LOCAL_DEVICES)
    jax.distributed.initialize(f"localhost:{port}", 2, int(number))
    found = member(Path(root))
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


@pytest.mark.faults
@pytest.mark.slow
def test_two_processes_resume_past_damage_and_validate_what_each_reads_in_part(
    tmp_path: Path,
) -> None:
    port = free_port()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    logs = [tmp_path / f"log-{i}" for i in range(2)]
    members = []
    for i, log in enumerate(logs):
        with log.open("w") as stderr:
            command = [sys.executable, __file__, str(port), str(i), str(tmp_path / "run")]
            members.append(
                subprocess.Popen(
                    command, env=kept, stdout=subprocess.PIPE, stderr=stderr, text=True
                )
            )
    outputs = [process.communicate(timeout=400)[0] for process in members]
    assert [process.returncode for process in members] == [0, 0], [log.read_text() for log in logs]
    for found in (json.loads(output.splitlines()[-1]) for output in outputs):
        assert "the processes would save different things" in found["different"]
        assert found["restored_step"] == 2
        assert found["warnings"] == ["step 3 is passed over"]
        assert found["is_exact"]
        assert found["shares"] == [0.5]  # each its own half
        assert found["ok"] == [True, True, False]
        assert found["error"]
        assert found["shares_of_validation"] == [0.5]
        assert found["latest_valid"] == 2


if __name__ == "__main__":
    main(*sys.argv[1:])
