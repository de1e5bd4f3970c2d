"""examples/long_run.py on Ray: a worker that dies costs the steps since the last checkpoint.

    pip install 'ray[train]'
    python examples/on_ray.py                                 # the same again goes on
    python examples/on_ray.py --workers 1 --devices 8         # on fewer workers, or on more

Ray Train starts a process for each worker and numbers them. If one is lost, jdp ends the others,
and Ray starts all again, which go on from the last checkpoint; with --least also on fewer, and on
more once there are more. With RAY_ADDRESS set they run on that cluster; --out is then a folder that
all its machines see. Takes half a minute.
"""
# pyright: reportMissingImports=false

import dataclasses
import logging
import os
import socket
from pathlib import Path

import jax
import long_run
import ray
import ray.train
import ray.train.collective
import tyro
from ray.train.v2.jax import JaxConfig, JaxTrainer

import jdp


@dataclasses.dataclass(frozen=True)
class Config:
    """What runs where."""

    workers: int = 2
    least: int | None = None  # with how few it goes on where there are no more; None: it waits
    devices: int = 4  # emulated in each worker, where there is no GPU or TPU
    max_failures: int = 3
    steps: int = 2000
    save_every: int = 100
    out: Path = Path("out/on_ray")


def free_address() -> str:
    """A host and port of this machine for the others to join at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def work(given: dict[str, Config]) -> None:
    """What each worker does: it joins the others, and trains."""
    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax's, of each save
    config, context = given["config"], ray.train.get_context()
    rank, count = context.get_world_rank(), context.get_world_size()
    address = ray.train.collective.broadcast_from_rank_zero(None if rank else free_address())
    jdp.emulate_devices(config.devices)
    jdp.initialize(address, num_processes=count, process_id=rank)
    long_run.main(long_run.Config(config.steps, config.save_every, config.out, devices=None))
    if count > 1:
        jax.distributed.shutdown()  # Ray ends the workers one by one: leave together before


def main(config: Config) -> None:
    """Starts the workers, and again after failures."""
    config = dataclasses.replace(config, out=config.out.resolve())
    workers = config.workers if config.least is None else (config.least, config.workers)
    trainer = JaxTrainer(
        work,
        train_loop_config={"config": config},
        jax_config=JaxConfig(),  # work() joins them, with jdp's watchdog
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            storage_path=str(config.out / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=config.max_failures),
        ),
    )
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:  # a small one on this machine
        least = 80 * 2**20  # bytes that Ray accepts for its object store; nothing is put there
        ray.init(num_cpus=config.workers, include_dashboard=False, object_store_memory=least)
    try:
        trainer.fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main(tyro.cli(Config))
