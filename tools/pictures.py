"""Draws the pictures of the guides into `docs/_static`, from what the packages compute.

    hatch run dev:pictures                 # all; a minute
    hatch run dev:pictures ratchet muon

Each is an SVG of the width of a phone, whose text takes the colour of the reader's scheme.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import opt_optax_bridge as opt
from jax.sharding import AbstractMesh
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import PercentFormatter

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "examples"), str(ROOT / "tools" / "bench")]
STATIC = ROOT / "docs" / "_static"
INK, PAPER = "#1f2328", "#ffffff"
DARK = {INK: "#e6edf3", PAPER: "#0d1117"}
BLUE, ORANGE, GREEN, RED, GREY = "#3b7dbb", "#b9770e", "#2f9161", "#d1495b", "#808080"
GIB, MIB = 2**30, 2**20
MESH = AbstractMesh((64, 8, 8), ("data", "fsdp", "model"))


def figure(height: float, **options: Any) -> Figure:
    """An empty picture, 450 pixels wide."""
    return Figure((4.6875, height), layout="constrained", facecolor=PAPER, **options)


def bare(axes: Any, *sides: str) -> None:
    """Leaves only some sides of the frame."""
    axes.set_facecolor("none")
    axes.spines[:].set_visible(False)
    for side in sides:
        axes.spines[side].set_visible(True)


def ratchet() -> Figure:
    """A second moment after gradients fall to a hundredth, in five storages."""
    from compare_precisions import LOUD, QUIET, RATCHETS
    from compare_precisions import ratchet as means

    picture = figure(3.4)
    axes: Any = picture.subplots()
    colours = dict(zip(RATCHETS, (INK, ORANGE, BLUE, RED, GREEN), strict=True))
    steps = np.arange(0, LOUD + QUIET, 20)
    for name, codec in RATCHETS.items():
        style = "--" if "nearest" in name else "-" if name == "float32" else ":"
        width = 3.5 if name == "float32" else 2
        axes.plot(steps, means(codec), style, color=colours[name], label=name, linewidth=width)
    axes.axvline(LOUD, color=GREY, linewidth=0.8)
    axes.text(LOUD + 100, 2e-5, "gradients fall to 1/100", color=GREY)
    axes.set(yscale="log", ylim=(1e-5, 1), xlabel="step", title="mean second moment, b2 = 0.999")
    bare(axes, "left", "bottom")
    picture.legend(loc="outside lower center", ncols=3, frameon=False)
    return picture


def zero() -> Figure:
    """Bytes on each of 4,096 devices, of the 70B decoder with three optimizers."""
    import decoder_70b
    from opt_partition import memory_plan

    levels: dict[str, Any] = {"no ZeRO": {}, "ZeRO-1": {"zero": "data"}}
    levels["ZeRO-2"] = {"zero": "data", "zero_level": 2}
    picture = figure(4.2)
    axes: Any = picture.subplots()
    place, ticks = 0.0, {}
    for name in ("adamw", "lion", "adafactor"):
        tx, params, names = getattr(decoder_70b, name)()
        for level, options in levels.items():
            plan = memory_plan(tx, params, names, decoder_70b.RULES, MESH, **options)
            sizes = (
                (plan.params.bytes_per_device, BLUE),
                (plan.grads.bytes_per_device, ORANGE),
                (plan.state.bytes_per_device, GREEN),
            )
            start = 0.0
            for size, colour in sizes:
                axes.barh(place, size / GIB, 0.8, start, color=colour)
                start += size / GIB
            axes.text(start, place, f" {start:.1f}", va="center")
            ticks[place] = f"{name}, {level}"
            place += 1
        place += 0.5
    axes.set_yticks([*ticks], [*ticks.values()])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="GiB per device", title="Llama 3 70B in float32 on 4,096 devices")
    bare(axes, "bottom")
    labels = zip(("parameters", "gradients", "optimizer state"), (BLUE, ORANGE, GREEN), strict=True)
    boxes = [Patch(color=colour, label=label) for label, colour in labels]
    picture.legend(handles=boxes, loc="outside lower center", ncols=3, frameon=False)
    return picture


def groups() -> Figure:
    """The plan of AdamW with ZeRO-1 for the 70B decoder, as `MemoryPlan.plot` draws it."""
    import decoder_70b
    from opt_partition import memory_plan

    tx, params, names = decoder_70b.adamw()
    plan = memory_plan(tx, params, names, decoder_70b.RULES, MESH, zero="data")
    picture: Any = plan.plot()
    picture.set_size_inches(4.6875, 3.4)
    picture.set_facecolor(PAPER)
    legend = picture.legends.pop()
    labels = [text.get_text() for text in legend.texts]
    picture.legend(
        legend.legend_handles, labels, loc="outside lower center", ncols=2, frameon=False
    )
    picture.axes[0].set_title("", loc="left")
    picture.axes[0].set_title("Llama 3 70B, AdamW with ZeRO-1")
    for text in picture.findobj(Text):
        text.set_color(INK)
    drawn: Figure = picture
    return drawn


def muon() -> Figure:
    """What a device sends in a step of Muon, as the compiler shards it and as planned."""
    from _steps import MUON, OPTAX_MUON, plan_step
    from opt_partition import read_collectives

    kinds = {"all-gather": BLUE, "all-reduce": ORANGE, "all-to-all": GREEN}
    picture = figure(2.5)
    axes: Any = picture.subplots()
    for place, (name, label) in enumerate([(OPTAX_MUON, "the compiler"), (MUON, "opt-matrix")]):
        rows = read_collectives(plan_step(name, 8, 2, 16, (256, 512)).lower().compile())
        start = 0.0
        for kind, colour in kinds.items():
            size = sum(row.total_bytes for row in rows if row.kind == kind) / MIB
            axes.barh(place, size, 0.4, start, color=colour)
            start += size
        number = sum(row.count for row in rows)
        axes.text(0, place - 0.3, f"{label}: {number} collectives, {start:.1f} MiB")
    axes.set(yticks=[], xlabel="MiB per device and step", ylim=(1.4, -0.6))
    axes.set_title("16 matrices of 256 by 512 on 4 by 2 devices")
    bare(axes, "bottom")
    boxes = [Patch(color=colour, label=kind) for kind, colour in kinds.items()]
    picture.legend(handles=boxes, loc="outside lower center", ncols=3, frameon=False)
    return picture


def microbatches() -> Figure:
    """Temporaries of a gradient and its error, by the number of microbatches."""
    from opt_accumulate import accumulate_gradients

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (64, 1024)) / 8,
        "down": jax.random.normal(keys[1], (1024, 64)) / 32,
    }
    rows = jnp.arange(256)
    batch = {"x": jax.random.normal(keys[2], (256, 64)), "mask": rows % 16 < rows // 16 + 1}

    def loss(params: Any, batch: Any) -> Any:
        out = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
        losses = jnp.square(out - batch["x"]).sum(-1)
        return jnp.where(batch["mask"], losses, 0.0).sum(), batch["mask"].sum()

    def mean(params: Any, batch: Any) -> Any:
        total, count = loss(params, batch)
        return total / count

    exact = jax.jit(jax.grad(mean))(params, batch)["up"]
    numbers = [1, 2, 4, 8, 16]
    options: dict[str, tuple[Any, Any, str]] = {
        "sums and token counts": (loss, {}, GREEN),
        "mean of means": (mean, {"weights": "mean_of_means"}, RED),
    }
    picture = figure(2.6)
    axes: Any = picture.subplots(1, 2)
    for name, (function, chosen, colour) in options.items():
        sizes, errors = [], []
        for number in numbers:
            gradient = accumulate_gradients(function, num_microbatches=number, **chosen)
            compiled: Any = jax.jit(gradient).lower(params, batch).compile()
            sizes.append(compiled.memory_analysis().temp_size_in_bytes / MIB)
            error = compiled(params, batch)[1]["up"] - exact
            errors.append(float(jnp.linalg.norm(error) / jnp.linalg.norm(exact)))
        if not chosen:
            axes[0].plot(numbers, sizes, "o-", color=BLUE)
        axes[1].plot(numbers, errors, "o-", color=colour, label=name)
    for part in axes:
        part.set_xscale("log", base=2)
        part.set_xticks(numbers, [*map(str, numbers)])
        part.set(xlabel="microbatches", ylim=(0, None))
        bare(part, "left", "bottom")
    axes[0].set_title("temporaries, MiB")
    axes[1].set_title("error of the gradient")
    axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    picture.legend(loc="outside lower center", ncols=2, frameon=False)
    return picture


def spike() -> Figure:
    """The loss of AdamW after one corrupt batch, with a guard and without, and of the average."""
    import optax
    from opt_accumulate import Spike, eval_params, guard, with_average

    inputs = jax.random.normal(jax.random.key(0), (512, 16))
    truth = jax.random.normal(jax.random.key(1), (16, 1))
    params = {"w": jnp.zeros((16, 1))}

    def loss(params: Any, x: Any, noise: Any) -> Any:
        return jnp.mean((x @ params["w"] - x @ truth - noise) ** 2)

    def train(tx: Any) -> Any:
        def step(carry: Any, number: Any) -> Any:
            params, state = carry
            key = jax.random.fold_in(jax.random.key(2), number)
            x = jax.random.normal(key, (32, 16))
            x = jnp.where(number == 150, 30.0, 1.0) * x
            noise = jax.random.normal(key, (32, 1))
            value, grads = jax.value_and_grad(loss)(params, x, noise)
            updates, state = tx.update(grads, state, params, loss=value)
            params = optax.apply_updates(params, updates)
            held_out = loss(params, inputs, 0.0), loss(eval_params(state, params), inputs, 0.0)
            return (params, state), held_out

        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(320))[1]

    averaged = with_average(optax.chain(optax.adamw(2e-2, b2=0.99)), 0.95, warmup=True)
    unguarded = train(averaged)[0]
    guarded, average = train(guard(averaged, loss=Spike()))
    picture = figure(2.8)
    axes: Any = picture.subplots()
    axes.plot(unguarded, color=RED, label="AdamW")
    axes.plot(guarded, color=BLUE, label="with a guard")
    axes.plot(average, color=GREEN, label="its average")
    axes.set(yscale="log", xlabel="step", title="held-out loss; one corrupt batch at step 150")
    bare(axes, "left", "bottom")
    picture.legend(loc="outside lower center", ncols=3, frameon=False)
    return picture


def restore() -> Figure:
    """A plan: what becomes of every parameter and its moments in a model that has changed."""
    from opt_checkpoint import Map, Pad, named_state, plan_restore

    kernel = jnp.ones((8, 8))
    old = {"embed": jnp.ones((6, 8)), "q": kernel, "k": kernel, "v": kernel, "mlp": kernel}
    new = {"embed": jnp.ones((8, 8)), "qkv": jnp.ones((8, 24)), "mlp": kernel, "head": kernel}

    def fused(q: Any, k: Any, v: Any) -> Any:
        return jnp.concatenate([q, k, v], axis=-1)

    plan = plan_restore(
        named_state(opt.adamw(1e-3).create(old)),
        opt.chain(opt.clip_by_global_norm(1.0), opt.adamw(1e-3)).create(new),
        allow={"initialise"},
        rules=[
            (r"(.*)/embed", Pad(axis=0, to=8)),
            (r"(.*)/qkv", Map((r"\1/q", r"\1/k", r"\1/v"), fused)),
        ],
    )
    kinds = {
        "kept": (plan.kept, GREEN),
        "converted": (plan.converted, BLUE),
        "initialised": (plan.initialised, ORANGE),
    }
    picture = figure(3.1)
    axes: Any = picture.subplots()
    columns = {"parameter": "params/", "Adam's mu": "state/adam/mu/", "nu": "state/adam/nu/"}
    for column, prefix in enumerate(columns.values()):
        for row, name in enumerate(new):
            [(kind, colour)] = [
                (kind, colour) for kind, (names, colour) in kinds.items() if prefix + name in names
            ]
            axes.barh(row, 0.94, 0.86, column + 0.03, color=colour)
            axes.text(column + 0.5, row, kind, color="#fdfdfd", ha="center", va="center")
    labels = {
        "embed": "embed\n6 → 8 rows",
        "qkv": "qkv\nfrom q, k, v",
        "mlp": "mlp",
        "head": "head\nis new",
    }
    axes.set_yticks(range(len(new)), [labels[name] for name in new])
    axes.set_xticks([i + 0.5 for i in range(len(columns))], [*columns])
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axes.set(ylim=(len(new) - 0.5, -0.5), xlim=(0, len(columns)))
    bare(axes)
    axes.set_xlabel("and a clip in front of AdamW, which moves nothing")
    return picture


PICTURES: dict[str, Callable[[], Figure]] = {
    f.__name__: f for f in (ratchet, zero, groups, muon, microbatches, spike, restore)
}


def for_both_schemes(svg: str) -> str:
    """Lets ink and paper follow the reader's colour scheme."""
    rules = "".join(
        f'[style*="{kind}: {colour}"]{{{kind}:{dark}!important}}'
        for colour, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media(prefers-color-scheme:dark){{{rules}}}</style>"
    return svg.replace("<defs>", f"{style}<defs>", 1)


def main(names: list[str]) -> None:
    """Draws some pictures, or all."""
    jax.config.update("jax_num_cpu_devices", 8)
    settings: Any = mpl.rcParams
    for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        settings[name] = INK
    settings.update({"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 9.5})
    settings.update({"axes.titlesize": 10.5, "font.sans-serif": ["DejaVu Sans", "Verdana"]})
    for name in names or PICTURES:
        path = STATIC / f"{name}.svg"
        PICTURES[name]().savefig(path, metadata={"Date": None})
        path.write_text(for_both_schemes(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
