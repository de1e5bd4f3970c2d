"""Metrics to Weights & Biases or MLflow: a log of `jdp.run` is a function, and so is theirs.

    pip install wandb    # or mlflow
    python examples/trackers.py --to=wandb     # WANDB_MODE=offline keeps it on this machine
    python examples/trackers.py --to=mlflow    # MLFLOW_TRACKING_URI=sqlite:///mlflow.db does

Process 0 logs, every ten steps. A run that is taken up again goes on in the tracker's run of the
same name; steps that it had logged before, W&B drops and MLflow shows twice. The loss falls from
about 14 to below 0.001 within 200 steps.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jdp

Log = Callable[[int, Mapping[str, float]], None]


@dataclasses.dataclass(frozen=True)
class Config:
    """What is logged, and where."""

    to: Literal["wandb", "mlflow"] = "wandb"
    name: str = "plane"
    steps: int = 200
    learning_rate: float = 0.1


def tracker(name: str) -> Any:
    """The library, or how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is not installed: pip install {name}.") from error


@contextlib.contextmanager
def to_wandb(config: Config) -> Iterator[Log]:
    """Weights & Biases."""
    settings = dataclasses.asdict(config)
    with tracker("wandb").init(
        project="jdp", id=config.name, resume="allow", config=settings
    ) as run:
        yield lambda step, values: run.log(dict(values), step=step)


@contextlib.contextmanager
def to_mlflow(config: Config) -> Iterator[Log]:
    """MLflow."""
    mlflow = tracker("mlflow")
    mlflow.set_experiment("jdp")
    named = f"attributes.run_name = '{config.name}'"
    found = mlflow.search_runs(filter_string=named, max_results=1, output_format="list")
    again = found[0].info.run_id if found else None
    with mlflow.start_run(run_id=again, run_name=config.name):
        if not found:
            mlflow.log_params(dataclasses.asdict(config))
        yield lambda step, values: mlflow.log_metrics(dict(values), step=step)


def loss_fn(params: Any, batch: dict[str, jax.Array]) -> jdp.Mean:
    return jdp.Mean.of((batch["x"] @ params["w"] - batch["y"]) ** 2, batch["weight"])


def main(config: Config) -> None:
    jdp.emulate_devices(8)
    jdp.initialize()
    x = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    source = jdp.Columns({"x": x, "y": x @ np.arange(1, 4, dtype=np.float32)})
    mesh = jdp.make_mesh()
    tx = optax.chain(jdp.all_reduce(), optax.adam(config.learning_rate))
    step = jdp.train_step(loss_fn, tx, mesh)
    state = jdp.init_state({"w": jnp.zeros(3)}, tx, mesh)
    batches = jdp.Batches(source, mesh, batch=64, seed=0)
    trackers = {"wandb": to_wandb, "mlflow": to_mlflow}
    with contextlib.ExitStack() as stack:
        log = []
        if jax.process_index() == 0:
            log.append(stack.enter_context(trackers[config.to](config)))
        jdp.run(step, state, batches, steps=config.steps, log=log)


if __name__ == "__main__":
    main(tyro.cli(Config))
