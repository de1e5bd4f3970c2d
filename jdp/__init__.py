"""jdp: data-parallel training of JAX models, from one pure loss function.

    mesh = jdp.make_mesh()
    tx = optax.chain(jdp.all_reduce(), optax.adamw(3e-4))
    step = jdp.train_step(loss_fn, tx, mesh)
    state = jdp.init_state(params, tx, mesh)
    for batch in jdp.feed(loader, mesh):
        state, metrics = step(state, batch)

    jdp.zero1(optax.adamw(3e-4))   instead of the chain, splits the optimizer state; zero2, zero3

Floors, each importing only from those above it:

    mesh, flat, quantize, collectives, nodes, tree, options, processes, balance, prefetch, pace,
    launch, launched, service, joining, watchdog, stopping, parting
    dataflow, replica, padded, split, checksum, rows, fragments, remat, lazy, loss, microbatch,
    unshard, given, grad, order, packing, placement, data, sources, files, packed, shuffle, workers,
    reads, together, loading, batches
    feedback, compress, power, reduce, hierarchy, noise, backward, accumulate, parts, zero,
    precision, finite, offload, local, local_step, local_state
    state, restage, update, train, evaluate, check, agreement, drift, hlo, live, holdings, memory,
    hardware, manifest, archive, folder, decisions, saving, keeping, checkpoint, export
    sent, asked, groups, origin, costs, flops, targets, roofline, schedule, compiling, reporting,
    report, contract, alike, tables
        page_parts, page_timeline, page_holdings, page_sections, page, page_answers
        sizes, probe, memory_model, step_time, strategy, planned, wanted, split_advice,
        confirmed, planning
        links, trace, silent, chain, payoff_facts, payoff, pays, findings, diagnosis, watch,
        machine, diagnose
    script, loop, logs, demo, cli

What is on the last floor, and checkpoints, are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jdp import collectives, nodes
from jdp.accumulate import MultiStepsState, drop_window, multi_steps
from jdp.agreement import check_processes
from jdp.backward import all_reduce_in_backward, all_reduce_in_order
from jdp.balance import Balanced, balance, exchange_times, rebalance
from jdp.batches import Batches
from jdp.check import check_against_one_device, check_order
from jdp.collectives import all_gather
from jdp.compress import random_k, sign, top_k
from jdp.data import feed
from jdp.drift import Drift, DriftError, check_replicas
from jdp.evaluate import eval_step, evaluate
from jdp.feedback import CompressedState
from jdp.files import ArrayRecords, Parquet, TokenFile
from jdp.finite import (
    LossScaleState,
    SkipState,
    dynamic_loss_scale,
    find_loss_scale,
    global_norm,
    skip_nonfinite,
)
from jdp.grad import value_and_grad
from jdp.hierarchy import hierarchical
from jdp.holdings import Holdings, holdings
from jdp.loading import Pace
from jdp.local import diloco, local_sgd
from jdp.local_state import LocalState
from jdp.loss import Mean
from jdp.memory import Memory, memory
from jdp.mesh import axis_size, data_axes, emulate_devices, make_mesh, replicate
from jdp.noise import (
    NoiseScaleState,
    find_noise_scale,
    gradient_noise_scale,
    per_replica_norms,
)
from jdp.offload import offload
from jdp.options import known_options, xla_options
from jdp.packed import Packed
from jdp.padded import Padded, logical
from jdp.power import PowerMemory, power_sgd
from jdp.precision import MasterWeightsState, Precision, compute_in, master_weights
from jdp.processes import initialize
from jdp.reduce import all_reduce
from jdp.replica import PerReplica, Reduced
from jdp.restage import restage
from jdp.rows import agreed
from jdp.shuffle import shuffled
from jdp.sources import Columns
from jdp.split import Placement, ZeroState
from jdp.state import TrainState, flush, init_state
from jdp.stopping import Stop
from jdp.train import TrainStep, train_step
from jdp.unshard import gather_params, layerwise
from jdp.watchdog import note_alive, note_step
from jdp.zero import zero1, zero2, zero3

if TYPE_CHECKING:
    from jdp.checkpoint import Checkpoints
    from jdp.contract import Contract, ContractError
    from jdp.diagnose import doctor
    from jdp.diagnosis import Diagnosis
    from jdp.export import export_params, import_params
    from jdp.folder import CheckpointError
    from jdp.links import Links
    from jdp.logs import JsonLines, TensorBoard
    from jdp.loop import every, run
    from jdp.machine import Machine, doctor_machine
    from jdp.planned import Plan
    from jdp.planning import plan
    from jdp.report import explain
    from jdp.reporting import Report
    from jdp.strategy import Strategy

__all__ = [
    "ArrayRecords",
    "Balanced",
    "Batches",
    "CheckpointError",
    "Checkpoints",
    "Columns",
    "CompressedState",
    "Contract",
    "ContractError",
    "Diagnosis",
    "Drift",
    "DriftError",
    "Holdings",
    "JsonLines",
    "Links",
    "LocalState",
    "LossScaleState",
    "Machine",
    "MasterWeightsState",
    "Mean",
    "Memory",
    "MultiStepsState",
    "NoiseScaleState",
    "Pace",
    "Packed",
    "Padded",
    "Parquet",
    "PerReplica",
    "Placement",
    "Plan",
    "PowerMemory",
    "Precision",
    "Reduced",
    "Report",
    "SkipState",
    "Stop",
    "Strategy",
    "TensorBoard",
    "TokenFile",
    "TrainState",
    "TrainStep",
    "ZeroState",
    "agreed",
    "all_gather",
    "all_reduce",
    "all_reduce_in_backward",
    "all_reduce_in_order",
    "axis_size",
    "balance",
    "check_against_one_device",
    "check_order",
    "check_processes",
    "check_replicas",
    "collectives",
    "compute_in",
    "data_axes",
    "diloco",
    "doctor",
    "doctor_machine",
    "drop_window",
    "dynamic_loss_scale",
    "emulate_devices",
    "eval_step",
    "evaluate",
    "every",
    "exchange_times",
    "explain",
    "export_params",
    "feed",
    "find_loss_scale",
    "find_noise_scale",
    "flush",
    "gather_params",
    "global_norm",
    "gradient_noise_scale",
    "hierarchical",
    "holdings",
    "import_params",
    "init_state",
    "initialize",
    "known_options",
    "layerwise",
    "local_sgd",
    "logical",
    "make_mesh",
    "master_weights",
    "memory",
    "multi_steps",
    "nodes",
    "note_alive",
    "note_step",
    "offload",
    "per_replica_norms",
    "plan",
    "power_sgd",
    "random_k",
    "rebalance",
    "replicate",
    "restage",
    "run",
    "shuffled",
    "sign",
    "skip_nonfinite",
    "top_k",
    "train_step",
    "value_and_grad",
    "xla_options",
    "zero1",
    "zero2",
    "zero3",
]

_LATER = {
    "CheckpointError": "jdp.folder",
    "Checkpoints": "jdp.checkpoint",
    "Contract": "jdp.contract",
    "ContractError": "jdp.contract",
    "Diagnosis": "jdp.diagnosis",
    "JsonLines": "jdp.logs",
    "Links": "jdp.links",
    "Machine": "jdp.machine",
    "Plan": "jdp.planned",
    "Report": "jdp.reporting",
    "Strategy": "jdp.strategy",
    "TensorBoard": "jdp.logs",
    "doctor": "jdp.diagnose",
    "doctor_machine": "jdp.diagnose",
    "every": "jdp.loop",
    "explain": "jdp.report",
    "export_params": "jdp.export",
    "import_params": "jdp.export",
    "plan": "jdp.planning",
    "run": "jdp.loop",
}


def __getattr__(name: str) -> Any:
    """Imports what explains, plans and diagnoses, when it is asked for."""
    """Imports what explains a program or saves a state, when it is asked for."""
    if name not in _LATER:
        raise AttributeError(f"module 'jdp' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
