"""jdp: data-parallel training of JAX models, from one pure loss function.

    mesh = jdp.make_mesh()
    tx = optax.chain(jdp.all_reduce(), optax.adamw(3e-4))
    step = jdp.train_step(loss_fn, tx, mesh)
    state = jdp.init_state(params, tx, mesh)
    for batch in jdp.feed(loader, mesh):
        state, metrics = step(state, batch)

Floors, each importing only from those before it: mesh, collectives, options, processes, prefetch,
pace; dataflow, replica, loss, microbatch, grad, packing, data, order; reduce, accumulate; state,
train, evaluate, check.
"""

from jdp import collectives
from jdp.accumulate import MultiStepsState, drop_window, multi_steps
from jdp.check import check_against_one_device, check_order
from jdp.collectives import all_gather
from jdp.data import feed
from jdp.evaluate import eval_step, evaluate
from jdp.grad import value_and_grad
from jdp.loss import Mean
from jdp.mesh import axis_size, data_axes, emulate_devices, make_mesh, replicate
from jdp.options import known_options, xla_options
from jdp.processes import initialize
from jdp.reduce import all_reduce
from jdp.replica import PerReplica
from jdp.state import TrainState, flush, init_state
from jdp.train import TrainStep, train_step

__all__ = [
    "Mean",
    "MultiStepsState",
    "PerReplica",
    "TrainState",
    "TrainStep",
    "all_gather",
    "all_reduce",
    "axis_size",
    "check_against_one_device",
    "check_order",
    "collectives",
    "data_axes",
    "drop_window",
    "emulate_devices",
    "eval_step",
    "evaluate",
    "feed",
    "flush",
    "init_state",
    "initialize",
    "known_options",
    "make_mesh",
    "multi_steps",
    "replicate",
    "train_step",
    "value_and_grad",
    "xla_options",
]
