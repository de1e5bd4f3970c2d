"""What compiling with jdp's options hides, for each ZeRO stage, read off compiled programs.

    python benchmarks/stages.py                       # 16 H100s in two hosts
    python benchmarks/stages.py --platform tpu        # a v5e:4x4 slice
    python benchmarks/stages.py --stages 0 --scanned --in-backward      # layers in a scan
    python benchmarks/stages.py --json stages.json

A training step of a deep MLP or transformer (`deep.py`, AdamW) is compiled for devices
that are not here, once with the options XLA takes by itself and once with `jdp.xla_options`.
`temporary` is the compiler's memory beyond parameters, state and batch; the times are its
estimates, see `schedule.py`. Expected: with jdp's options less is exposed, in every stage; XLA:GPU
does as well alone in stage 0, where leaves of 16 MiB are too large for its own buckets of 30 MB.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import deep
import described
import measure
import numpy as np
import optax
import schedule
import tyro
from jax.sharding import Mesh
from measure import Goal

import jdp

TOPOLOGIES = {"gpu": "1x2x8", "tpu": "v5e:4x4"}
# Rows with which a layer is computed for longer than its parameters are sent twice.
ROWS = {"gpu": {"mlp": 16384, "transformer": 32}, "tpu": {"mlp": 4096, "transformer": 8}}
ARMS = ("all_reduce", "zero1", "zero2", "zero3")


@dataclasses.dataclass(frozen=True)
class Config:
    """Compiles a training step under each ZeRO stage and reads its schedule."""

    platform: Literal["gpu", "tpu"] = "gpu"
    topology: str | None = None  # `None` takes `TOPOLOGIES`
    stages: tuple[int, ...] = (0, 1, 2, 3)
    width: int = 2048
    layers: int = 8
    model: Literal["mlp", "transformer"] = "mlp"
    scanned: bool = False  # over the layers
    in_backward: bool = False  # stage 0 with jdp.all_reduce_in_backward
    microbatch: int | None = None
    rows: int | None = None  # of a device's batch; `None` takes `ROWS`
    quick: bool = False  # a small model, to see that it runs
    json: Path | None = None  # where to write the results


def main(config: Config) -> None:
    if what := described.missing(config.platform):
        raise SystemExit(f"The compiler is missing: {what}.")
    if config.quick:
        config = dataclasses.replace(config, width=512, layers=2, rows=config.rows or 128)
    elif config.rows is None:
        config = dataclasses.replace(config, rows=ROWS[config.platform][config.model])
    devices = described.devices(config.platform, config.topology or TOPOLOGIES[config.platform])
    results, goals = [], []
    for stage in config.stages:
        default, ours = (row(stage, options, devices, config) for options in ("XLA", "jdp"))
        results += [default, ours]
        what = f"stage {stage}: exposed with jdp's options / without"
        ratio = ours["exposed_ms"] / max(default["exposed_ms"], 1e-6)
        goals.append(Goal(what, ratio, 1.0))
    measure.report("stages", dataclasses.asdict(config), results, goals, config.json)


def row(stage: int, options: str, devices: Sequence[Any], config: Config) -> dict[str, Any]:
    """Memory and times of one stage, with XLA's options or jdp's."""
    mesh = Mesh(np.array(devices), ("data",))
    chosen = jdp.known_options(jdp.xla_options(mesh), mesh) if options == "jdp" else {}
    step, state, batch = program(
        stage, mesh, config, chosen | schedule.COST_MODEL.get(config.platform, {})
    )
    compiled = step.lower(state, batch).compile()
    times = schedule.read(compiled.as_text(), devices)
    return {
        "stage": stage,
        "arm": ARMS[stage],
        "options": options,
        "temporary_GB": compiled.memory_analysis().temp_size_in_bytes / 1e9,
        "compute_ms": times.compute_us / 1e3,
        "sent_ms": times.sent_us / 1e3,
        "exposed_ms": times.exposed_us / 1e3,
        "hidden": times.hidden,
    }


def program(stage: int, mesh: Mesh, config: Config, options: dict[str, Any]) -> Any:
    """Step, state and batch of a stage, as shapes."""
    model = deep.make(config.model, config.width)
    reduces = jdp.all_reduce_in_backward if config.in_backward else jdp.all_reduce
    inner = optax.adamw(3e-4)
    stages = {1: jdp.zero1, 2: jdp.zero2, 3: jdp.zero3}
    tx = stages[stage](inner) if stage else optax.chain(reduces(), inner)
    params, batch = deep.shapes(
        model, config.layers, config.rows or 0, mesh, scanned=config.scanned
    )
    state = jdp.init_state(params, tx, mesh)
    loss_fn = deep.loss_of(model, scanned=config.scanned)
    step = jdp.train_step(loss_fn, tx, mesh, compiler_options=options, microbatch=config.microbatch)
    return step, state, batch


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
