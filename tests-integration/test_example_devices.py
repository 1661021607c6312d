"""Which devices `examples/train_lm.py` takes, and what it shows on a terminal of 80 columns."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True)
class Device:
    """What a mesh is chosen by."""

    platform: str
    process_index: int = 0
    id: int = 0


sys.path.insert(0, str(EXAMPLES))


def load(module: str) -> Any:
    return importlib.import_module(f"lm.{module}")


def make(platform: str, *counts: int) -> list[Device]:
    """Devices of several processes, mixed as an interconnect may have them."""
    pairs = [(i, process) for process, count in enumerate(counts) for i in range(count)]
    return [Device(platform, process, i) for i, process in sorted(pairs)]


@pytest.mark.parametrize(
    ("platform", "counts", "flags", "mesh"),
    [
        ("gpu", (1,), {}, "data=1,model=1"),
        ("gpu", (3,), {}, "data=2,model=1"),
        ("gpu", (6,), {}, "data=4,model=1"),
        ("cpu", (8,), {}, "data=4,model=2"),
        ("gpu", (8,), {"heads": 1, "d_model": 2}, "data=8,model=1"),
        ("gpu", (8,), {"batch_size": 2}, "data=2,model=4"),
        ("gpu", (8,), {"microbatches": 16}, "data=1,model=4"),
        ("tpu", (4, 4, 4, 4), {}, "data=8,model=2"),
        ("tpu", (256,), {}, "data=16,model=4"),
        ("gpu", (4, 4), {"mesh": "data=2,model=1"}, "data=2,model=1"),
    ],
)
def test_devices_that_are_taken(
    platform: str, counts: tuple[int, ...], flags: dict[str, Any], mesh: str
) -> None:
    devices = load("devices")
    config, taken = devices.choose_devices(devices.Config(**flags).check(), make(platform, *counts))
    assert config.mesh == mesh
    data, model = config.mesh_shape
    assert len(set(taken)) == len(taken) == data * model
    shares = Counter(device.process_index for device in taken)
    assert shares == dict.fromkeys(range(len(counts)), data * model // len(counts))


@pytest.mark.parametrize(
    ("counts", "mesh", "message"),
    [
        ((2,), "data=4,model=2", "takes 8 devices, and there are 2 gpu devices; --mesh data=2,mod"),
        ((2, 2), "data=1,model=1", "takes 1 devices, and there are 4 gpu devices; --mesh data=4,m"),
        ((1, 1, 1), "", "no mesh of 3 gpu devices in 3 processes divides --batch-size 16, "),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(
    counts: tuple[int, ...], mesh: str, message: str
) -> None:
    devices = load("devices")
    with pytest.raises(devices.UsageError, match=message):
        devices.choose_devices(devices.Config(mesh=mesh), make("gpu", *counts))


def test_accelerators_are_taken_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = load("devices")
    settings: Any = jax.config
    before, there = settings.jax_platforms, make("gpu", 2)
    monkeypatch.setattr(jax, "devices", lambda: there)
    monkeypatch.setattr(jax, "make_mesh", lambda *shape, **options: (shape[:2], options["devices"]))
    config, mesh = devices.take_devices(devices.Config(), 1)
    assert config.mesh == "data=2,model=1"
    assert mesh == (((2, 1), ("data", "model")), there)
    assert settings.jax_platforms == before


@pytest.mark.parametrize(
    ("stats", "refused"),
    [
        ({"bytes_limit": 2**40}, ""),
        (None, ""),
        (
            {"bytes_limit": 1000},
            "a training step takes at least 915.5 MiB, and gpu0 has 1000 B: take a smaller --d-",
        ),
        (
            {"bytes_limit": 10**9},
            "a training step takes at least 1.2 GiB, and gpu0 has 953.7 MiB: take a smaller --b",
        ),
    ],
)
def test_what_a_device_has_no_memory_for_is_refused(
    stats: dict[str, int] | None, refused: str
) -> None:
    memory = load("memory")

    class Gpu:
        platform = "gpu"
        memory_stats = staticmethod(lambda: stats)
        __str__ = staticmethod(lambda: "gpu0")

    config = load("config").Config(mesh="data=1,model=1", sequence_length=1024)
    job = SimpleNamespace(config=config, mesh=SimpleNamespace(local_devices=[Gpu()] * 2))
    plan = SimpleNamespace(total_bytes_per_device=960_000_000)
    with pytest.raises(memory.UsageError) if refused else contextlib.nullcontext() as caught:
        memory.check_memory(job, plan)
    assert str(caught.value if caught else "").startswith(refused)
