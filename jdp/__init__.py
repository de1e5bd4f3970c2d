"""jdp: data-parallel training of JAX models, from one pure loss function.

    mesh = jdp.make_mesh()
    tx = optax.chain(jdp.all_reduce(), optax.adamw(3e-4))
    step = jdp.train_step(loss_fn, tx, mesh)
    state = jdp.init_state(params, tx, mesh)
    for batch in jdp.feed(loader, mesh):
        state, metrics = step(state, batch)

    jdp.zero1(optax.adamw(3e-4))   instead of the chain, splits the optimizer state; zero2, zero3

Floors, each importing only from those before it: mesh, collectives, tree, options, processes,
prefetch, pace; dataflow, replica, padded, split, remat, lazy, loss, microbatch, unshard, given,
grad, packing, data, order; reduce, backward, accumulate, parts, zero, precision, finite, offload; state,
restage, update, train, evaluate, check, hlo, live, holdings, memory.
"""

from jdp import collectives
from jdp.accumulate import MultiStepsState, drop_window, multi_steps
from jdp.backward import all_reduce_in_backward, all_reduce_in_order
from jdp.check import check_against_one_device, check_order
from jdp.collectives import all_gather
from jdp.data import feed
from jdp.evaluate import eval_step, evaluate
from jdp.finite import (
    LossScaleState,
    SkipState,
    dynamic_loss_scale,
    find_loss_scale,
    global_norm,
    skip_nonfinite,
)
from jdp.grad import value_and_grad
from jdp.holdings import Holdings, holdings
from jdp.loss import Mean
from jdp.memory import Memory, memory
from jdp.mesh import axis_size, data_axes, emulate_devices, make_mesh, replicate
from jdp.offload import offload
from jdp.options import known_options, xla_options
from jdp.padded import Padded, logical
from jdp.precision import MasterWeightsState, Precision, compute_in, master_weights
from jdp.processes import initialize
from jdp.reduce import all_reduce
from jdp.replica import PerReplica, Reduced
from jdp.restage import restage
from jdp.split import Placement, ZeroState
from jdp.state import TrainState, flush, init_state
from jdp.train import TrainStep, train_step
from jdp.unshard import gather_params, layerwise
from jdp.zero import zero1, zero2, zero3

__all__ = [
    "Holdings",
    "LossScaleState",
    "MasterWeightsState",
    "Mean",
    "Memory",
    "MultiStepsState",
    "Padded",
    "PerReplica",
    "Placement",
    "Precision",
    "Reduced",
    "SkipState",
    "TrainState",
    "TrainStep",
    "ZeroState",
    "all_gather",
    "all_reduce",
    "all_reduce_in_backward",
    "all_reduce_in_order",
    "axis_size",
    "check_against_one_device",
    "check_order",
    "collectives",
    "compute_in",
    "data_axes",
    "drop_window",
    "dynamic_loss_scale",
    "emulate_devices",
    "eval_step",
    "evaluate",
    "feed",
    "find_loss_scale",
    "flush",
    "gather_params",
    "global_norm",
    "holdings",
    "init_state",
    "initialize",
    "known_options",
    "layerwise",
    "logical",
    "make_mesh",
    "master_weights",
    "memory",
    "multi_steps",
    "offload",
    "replicate",
    "restage",
    "skip_nonfinite",
    "train_step",
    "value_and_grad",
    "xla_options",
    "zero1",
    "zero2",
    "zero3",
]
