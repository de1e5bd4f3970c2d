"""What a microbatch takes of a device, found by compiling it once, or guessed from its trace.

    loss, stage, m rows, remat  --probe-->  temporaries and compute of a device, as compiled
                                --guess-->  bytes kept and FLOPs, without a compiler

A probe is a training step compiled for a flat mesh and at most two microbatches; from what it found
follow other meshes, numbers of devices and accumulation (`jdp.memory_model`). Nothing runs.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdp.compiling import compile_for_report, on_target
from jdp.flops import flops
from jdp.hardware import find_chip
from jdp.loss import is_mean
from jdp.memory import memory_of
from jdp.mesh import make_mesh
from jdp.reduce import all_reduce
from jdp.remat import checkpoint_policy
from jdp.schedule import walk
from jdp.sizes import as_shapes, bytes_of, with_rows
from jdp.state import init_state
from jdp.targets import tpus
from jdp.train import train_step
from jdp.zero import zero1, zero2, zero3

# A program for four devices is as quick to compile as one for many, and runs on any machine's; what
# it takes of many is then off by up to 14 % (stage 3 on 16 H200s), so plans probe for all devices.
FEW = 4

Remat = bool | str | Callable[..., bool]


class Probe(NamedTuple):
    """What a device does with one or two microbatches, as compiled.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        microbatches: How many: 1 or 2.
        devices: Devices it was compiled for.
        temporaries: Bytes of temporaries.
        padding: Bytes that arguments take beyond their elements.
        flops: Of its products.
        bytes_moved: Bytes read and written in memory.
        compute_us: Microseconds, if the compiler tells; the update is included.
    """

    stage: int
    microbatches: int
    devices: int
    temporaries: int
    padding: int
    flops: float
    bytes_moved: float
    compute_us: float | None


def probe(
    loss_fn: Callable[..., Any],
    params: Any,
    tx: optax.GradientTransformation,
    batch: Any,
    *,
    stage: int,
    microbatch: int,
    microbatches: int = 1,
    remat: Remat = False,
    devices: Sequence[Any],
    key: Any = None,
    model_state: Any = None,
) -> Probe | None:
    """Compiles a step for a flat mesh of devices, and reads what one of them takes.

    Args:
        loss_fn: The loss.
        params: Parameters, or shapes.
        tx: The optimizer, without communication.
        batch: A batch, or shapes.
        stage: ZeRO stage; 0 is an all-reduce.
        microbatch: Rows of a microbatch.
        microbatches: Microbatches of a device, 1 or 2: further ones take no more memory.
        remat: See `jdp.train_step`.
        devices: Devices to compile for; `few_of` makes a few of many.
        key: A random key, if the loss takes one.
        model_state: Model state, if the loss takes some.

    Returns:
        The probe; `None` if the compiler says that it does not fit into the device.
    """
    mesh = make_mesh(devices=devices)
    step_tx = with_stage(tx, stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options: that is for the step that will be run
        step = train_step(loss_fn, step_tx, mesh, microbatch=microbatch, remat=remat)
        state = init_state(as_shapes(params), step_tx, mesh, key=key, model_state=model_state)
        rows = with_rows(batch, microbatch * microbatches * mesh.size)
        job = on_target(step, state, rows, None)
        traced = job.step.trace(job.state, job.batch)
        platform = mesh.devices.flat[0].platform
        compiled = compile_for_report(traced.lower(), platform).compiled
    if compiled is None:
        return None
    used, walked = memory_of(compiled, job.state, rows), walk(compiled.as_text(), mesh)
    return Probe(
        stage,
        microbatches,
        mesh.size,
        used.temporaries,
        max(0, used.padding),
        flops(traced.jaxpr, mesh.size),
        walked.bytes_moved,
        walked.compute_us,
    )


def few_of(devices: Sequence[Any]) -> Sequence[Any]:
    """Four devices like those given; of TPUs, a slice of its own.

    libtpu compiles for whole slices only, and four chips in a row of a larger one are none.
    """
    if devices[0].platform == "tpu" and len(devices) > FEW:
        chip = find_chip(devices[0].device_kind)
        sides = "2x2x1" if chip is not None and chip.name in ("v4", "v5p") else "2x2"
        if chip is not None:
            return tpus(f"{chip.name}:{sides}")
    return devices[:FEW]


def with_stage(
    tx: optax.GradientTransformation,
    stage: int,
    *,
    axis: str | None = None,
    wire_dtype: Any = None,
) -> optax.GradientTransformation:
    """An optimizer behind an all-reduce, or within a ZeRO stage."""
    if stage == 0:
        return optax.chain(all_reduce(wire_dtype=wire_dtype), tx)
    if stage == 2:
        return zero2(tx, axis, reduce="microbatch", wire_dtype=wire_dtype)
    return (zero1 if stage == 1 else zero3)(tx, axis, wire_dtype=wire_dtype)


class Guess(NamedTuple):
    """What is known of a microbatch without a compiler.

    Attributes:
        kept: Bytes that the backward pass finds kept.
        flops: Of its products.
        bytes_moved: Bytes of all results, each once written and once read.
        narrow: Of the FLOPs, those of products of 16 bits.
    """

    kept: int
    flops: float
    bytes_moved: float
    narrow: float = 0.0


def guess(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    microbatch: int,
    remat: Remat = False,
    key: Any = None,
    model_state: Any = None,
    axes: tuple[str, ...] = ("data",),
) -> Guess:
    """Traces a microbatch and counts what its backward pass keeps and computes.

    Guarantees:
        - Nothing is compiled; the compiler fuses, so programs keep and move less than this, and
          need room for what they are computing besides.
    """
    policy = checkpoint_policy(remat)
    given = (
        (() if key is None else (key,)),
        {} if model_state is None else {"model_state": model_state},
    )

    def loss(params: Any, rows: Any, given: Any) -> jax.Array:
        out: Any = loss_fn(params, rows, *given[0], **given[1])
        first: Any = out[0] if isinstance(out, tuple) and not is_mean(out) else out
        return first.value if is_mean(first) else first

    chosen = loss if policy is None else jax.checkpoint(loss, policy=policy)
    seen: list[Guess] = []

    def local(params: Any, rows: Any, given: Any) -> jax.Array:
        kept = jax.make_jaxpr(lambda p: jax.vjp(lambda p: chosen(p, rows, given), p)[1])(params)
        both = jax.make_jaxpr(jax.grad(chosen))(params, rows, given)
        narrow = flops(both, 1, narrow=True)
        seen.append(Guess(_kept(kept.jaxpr), flops(both, 1), _results(both.jaxpr), narrow))
        return jnp.zeros(())

    mesh = make_mesh(axes, (1,) * len(axes), devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec()
    jax.eval_shape(
        jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec),
        as_shapes(params),
        with_rows(batch, microbatch),
        as_shapes(given),
    )
    return seen[0]


def _kept(jaxpr: Any) -> int:
    """Bytes of the distinct results of a program that are none of its arguments."""
    given = set(map(id, (*jaxpr.invars, *jaxpr.constvars)))
    results = {id(v): v for v in jaxpr.outvars if hasattr(v, "count") or not hasattr(v, "val")}
    return sum(bytes_of(v.aval) for name, v in results.items() if name not in given)


def _results(jaxpr: Any) -> float:
    """Bytes that the operations of a program give, each once written and once read."""
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [
            getattr(x, "jaxpr", x)
            for value in eqn.params.values()
            for x in (value if isinstance(value, tuple | list) else (value,))
            if hasattr(getattr(x, "jaxpr", x), "eqns")
        ]
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        if inner:
            total += times * sum(map(_results, inner))
        else:
            total += 2.0 * sum(bytes_of(v.aval) for v in eqn.outvars if hasattr(v.aval, "dtype"))
    return total
