"""Times each reduction of jdp by itself, against `jax.lax.pmean` leaf by leaf.

    python benchmarks/reductions.py                      # 8 emulated devices, one process
    python benchmarks/reductions.py --processes 2        # over gloo; starts both itself
    python benchmarks/reductions.py --sets large --rounds 10 --json reductions.json

    small    100 leaves of 100 KB
    large    4 leaves of 25 MB

"sent" is counted in the compiled program, in bytes of float32's all-reduce. "error" is that of the
first mean, relative to its norm; error feedback makes up for it later. An emulated device's wire is
a copy in memory, so there a narrow dtype can only lose time; between processes the times show what
it costs to make the bits, and what it saves to send fewer.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import measure
import numpy as np
import optax
import payload
import tyro
from jax.sharding import Mesh
from processes import by_hand, launch, split

import jdp

SETS = {"small": (100, 100_000), "large": (4, 25_000_000)}  # leaves, and bytes of each


@dataclasses.dataclass(frozen=True)
class Config:
    """Times reductions of a gradient."""

    sets: tuple[str, ...] = ("small", "large")
    processes: int = 1
    devices: int = 8  # of one process; several processes have one each
    rounds: int = 20
    quick: bool = False  # few small leaves and rounds, to see that it runs
    json: Path | None = None  # where to write the results


def reductions() -> dict[str, optax.GradientTransformation]:
    """What is timed beside `pmean`."""
    narrow = {
        "bfloat16": jax.numpy.bfloat16,
        "float16": jax.numpy.float16,
        "float8_e4m3fn": jax.numpy.float8_e4m3fn,
        "int8": jax.numpy.int8,
    }
    arms = {"jdp": jdp.all_reduce()}
    arms |= {name: jdp.all_reduce(wire_dtype=wire) for name, wire in narrow.items()}
    arms["int8 feedback"] = jdp.all_reduce(wire_dtype=jax.numpy.int8, error_feedback=True)
    arms |= {"top_k 1 %": jdp.top_k(0.01), "random_k 1 %": jdp.random_k(0.01), "sign": jdp.sign()}
    return arms


def main(config: Config) -> None:
    if config.quick:
        config = dataclasses.replace(config, rounds=2)
    if config.processes > 1:
        launch(work, config, config.processes)
    else:
        jdp.emulate_devices(config.devices)
        show(config, [row for name in config.sets for row in compare(config, name)])


def work(config: Config, coordinator: str, index: int) -> None:
    """What each process does."""
    jdp.emulate_devices(1)
    jdp.initialize(coordinator, num_processes=config.processes, process_id=index)
    rows = [row for name in config.sets for row in compare(config, name)]
    if index == 0:
        show(config, rows)


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    measure.report("reductions", dataclasses.asdict(config), rows, [], config.json)


def compare(config: Config, name: str) -> list[dict[str, Any]]:
    """The rows of the table for one set; every process makes the same calls in the same order."""
    mesh = jdp.make_mesh()
    leaves, size = (4, 4000) if config.quick else SETS[name]
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((mesh.size, size // 4), np.float32) for _ in range(leaves)]
    values = [split(leaf, mesh) for leaf in host]
    exact = np.stack([leaf.mean(0, np.float64) for leaf in host])
    plain = by_hand(mesh)
    sent = {"pmean": _sent(plain, (values,), mesh)}
    error = {"pmean": _error(plain(values), exact)}
    turns = {"pmean": measure.stepper(lambda state: (state, plain(values)), None)}
    for arm, tx in reductions().items():
        update, grads, state = _arm(tx, values, mesh)
        sent[arm] = _sent(update, (grads, state), mesh)
        means, state = update(grads, state)
        error[arm] = _error(means, exact)
        turns[arm] = measure.stepper(functools.partial(_step, update, grads), state)
    times = measure.interleave(turns, config.rounds)
    return [
        {
            "set": name,
            "arm": arm,
            "exchange_ms": measure.median_ms(seconds),
            "/ pmean": measure.ratio(seconds, times["pmean"]),
            "sent": sent[arm] / sent["pmean"],
            "error": error[arm],
        }
        for arm, seconds in times.items()
    ]


def _arm(
    tx: optax.GradientTransformation, values: list[jax.Array], mesh: Mesh
) -> tuple[Any, list[Any], Any]:
    """A reduction as a program that takes its state over, its gradients and its first state."""
    grads = [jdp.PerReplica(value, axes=("data",), mesh=mesh) for value in values]
    params = jdp.replicate([np.zeros(value.shape[1:], np.float32) for value in values], mesh)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
    return jax.jit(tx.update, donate_argnums=1), grads, state


def _step(update: Any, grads: list[Any], state: Any) -> tuple[Any, Any]:
    """One exchange, in the order that `measure.stepper` wants."""
    means, state = update(grads, state)
    return state, means


def _error(means: Any, exact: np.ndarray) -> float:
    found = np.stack([np.asarray(mean, np.float64) for mean in means])
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def _sent(jitted: Any, arguments: tuple[Any, ...], mesh: Mesh) -> float:
    text = jitted.lower(*arguments).compile().as_text()
    return payload.sent_bytes(payload.collectives(text), mesh.size)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
