"""When data parallelism is not enough: data x tensor x pipeline, for transformer-like models.

    shapes of parameters  --describe-->  Transformer: layers, width, sequence, ...
    Transformer, chip     --splits--->   Split: data, tensor, pipeline; memory and time
                          --advise--->   sentences

An analytic model, with no program behind it: jdp itself trains data-parallel, with tensor
parallelism as an axis of your own. For L layers of width h, sequences of s tokens, b of them a
microbatch, in bytes on a device with tensor parallelism t and pipeline p:

    states        (params + grads) / (t p), optimizer / (t p), each split over d by the ZeRO stage
    activations   34 s b h / t for each layer; 24 if only products are kept; 2 if all is
                  recomputed, and one layer's whole; L / p layers of p microbatches under way
    gathered      stage 3: two layers' parameters, in the dtype of activations
    tensor        8 s b h (t-1)/t bytes a layer and microbatch, within a node
    pipeline      2 s b h bytes a boundary; (p-1) / (k+p-1) of the time is idle
    data          as in `jdp.costs`

References:
    Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022: 34 s b
    h without attention matrices. Narayanan et al., Efficient Large-Scale Language Model Training
    on GPU Clusters Using Megatron-LM, 2021: the bubble, tensor parallelism within a node.
"""

import math
from collections import Counter
from typing import Any, NamedTuple

import jax

from jdp.costs import collective_seconds
from jdp.hardware import Chip
from jdp.holdings import human
from jdp.sizes import Sizes

# Bytes of activations kept for the backward pass, in s b h. Of products alone, 2 bytes each: h of
# queries, h/2 of keys and values, h of attention, h of its projection, 7 h of a gated MLP, h of its
# output, and half of the residual stream between.
KEPT: dict[str, float] = {"none": 34.0, "selective": 24.0, "full": 2.0}

# Share of the peak that large transformers reach; what is compared are splits, not models.
_UTILISATION = 0.5


class Transformer(NamedTuple):
    """A transformer by its sizes.

    Attributes:
        layers: Layers.
        width: Of the residual stream.
        sequence: Tokens of a row.
        params: Parameters.
        vocabulary: Tokens there are; 0 if not known.
        param_bytes: Bytes of a stored parameter.
        grad_bytes: Bytes of a gradient, while it is added up.
        state_bytes: Bytes of optimizer state for each parameter.
        activation_bytes: Bytes of an activation.
    """

    layers: int
    width: int
    sequence: int
    params: float
    vocabulary: int = 0
    param_bytes: float = 4
    grad_bytes: float = 4
    state_bytes: float = 8
    activation_bytes: float = 2


class Split(NamedTuple):
    """How devices are divided, and what each then takes.

    Attributes:
        data, tensor, pipeline: Devices along each.
        stage: ZeRO stage along data.
        recompute: What the backward pass computes again: "none", "selective" or "full".
        memory: Bytes of a device.
        seconds: Of a step.
    """

    data: int
    tensor: int
    pipeline: int
    stage: int
    recompute: str
    memory: float
    seconds: float


def describe(params: Any, sizes: Sizes, batch: Any) -> Transformer | None:
    """The transformer that parameters look like; `None` if they do not.

    Layers are a first dim that most of the numbers share (stacked for a scan), or matrices of one
    shape, repeated; the width is the size that most dims of matrices have.
    """
    shapes = [tuple(x.shape) for x in jax.tree.leaves(params)]
    stacked = Counter[int]()
    for shape in shapes:
        if len(shape) >= 3:
            stacked[shape[0]] += math.prod(shape)
    matrices = Counter(s for s in shapes if len(s) == 2)
    if stacked and max(stacked.values()) > 0.5 * sizes.numbers:
        layers = stacked.most_common(1)[0][0]
        dims = [d for s in shapes if len(s) >= 3 for d in s[1:]]
    elif matrices and max(matrices.values()) > 1:
        layers = max(matrices.values())
        dims = [d for s, times in matrices.items() if times > 1 for d in s]
    else:
        return None
    counts = Counter(dims)
    width = min(counts, key=lambda size: (-counts[size], size))
    tokens = [x.shape[1] for x in jax.tree.leaves(batch) if len(x.shape) >= 2]
    whole = [max(s) for s in matrices if max(s) > 4 * width and s.count(width)]
    param_bytes = sizes.param_bytes / sizes.numbers
    return Transformer(
        layers=layers,
        width=width,
        sequence=max(tokens, default=1),
        params=float(sizes.numbers),
        vocabulary=max(whole, default=0),
        param_bytes=param_bytes,
        grad_bytes=max(4.0, param_bytes),
        state_bytes=sum(x.bytes for x in sizes.opt_state) / sizes.numbers,
    )


def memory_of_split(
    model: Transformer,
    *,
    data: int,
    tensor: int = 1,
    pipeline: int = 1,
    stage: int = 0,
    rows: int = 1,
    recompute: str = "none",
    in_flight: int | None = None,
) -> float:
    """Bytes of a device.

    Args:
        model: The model.
        data: Devices along the data axis.
        tensor: Devices along the tensor axis.
        pipeline: Stages of the pipeline.
        stage: ZeRO stage along data.
        rows: Rows of a microbatch.
        recompute: "none", "selective" (products are kept) or "full" (a layer's input is).
        in_flight: Microbatches whose activations are kept; by default as many as the pipeline.

    Example:
        >>> paper = Transformer(36, 4096, 1024, 7.5e9, 0, 2, 2, 12)  # ZeRO, figure 1
        >>> [round(memory_of_split(paper, data=64, stage=s, rows=0) / 1e9, 1) for s in range(4)]
        [120.0, 31.4, 16.6, 1.9]
    """
    own = model.params / (tensor * pipeline)
    over = [data if stage >= least else 1 for least in (3, 2, 1)]
    states = own * (
        model.param_bytes / over[0] + model.grad_bytes / over[1] + model.state_bytes / over[2]
    )
    layers = model.layers / pipeline
    unit = model.activation_bytes / 2 * model.sequence * rows * model.width / tensor
    kept = layers * KEPT[recompute] * unit
    whole = KEPT["none"] * unit if recompute != "none" else 0.0
    # logits, and their gradient, in float32 on the last stage
    logits = 8.0 * model.sequence * rows * model.vocabulary / tensor
    computed = min(model.param_bytes, model.activation_bytes)
    gathered = 2 * own * computed / max(layers, 1) if stage == 3 and rows else 0.0
    return states + kept * (in_flight or pipeline) + whole + logits + gathered


def splits(model: Transformer, chip: Chip, devices: int, rows: int) -> list[Split]:
    """All divisions of devices into data x tensor x pipeline that fit, quickest first.

    Args:
        model: The model.
        chip: What a device can do.
        devices: How many there are.
        rows: Rows of a step.
    """
    found = []
    per_node = min(chip.per_node, 16)  # beyond, a layer's matrices become too thin
    for tensor in _divisors(devices):
        if tensor > per_node or model.width % tensor:
            continue
        for pipeline in _divisors(devices // tensor):
            data = devices // tensor // pipeline
            if model.layers % pipeline or rows % data:
                continue
            for recompute in KEPT:
                for stage in (1, 3) if pipeline == 1 else (1,):
                    memory = memory_of_split(
                        model,
                        data=data,
                        tensor=tensor,
                        pipeline=pipeline,
                        stage=stage,
                        recompute=recompute,
                        in_flight=min(pipeline, rows // data),
                    )
                    if memory <= chip.memory:
                        seconds = _seconds(
                            model, chip, data, tensor, pipeline, stage, rows, recompute
                        )
                        found.append(
                            Split(data, tensor, pipeline, stage, recompute, memory, seconds)
                        )
    return sorted(found, key=lambda split: split.seconds)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _seconds(
    model: Transformer,
    chip: Chip,
    data: int,
    tensor: int,
    pipeline: int,
    stage: int,
    rows: int,
    recompute: str,
) -> float:
    """Seconds of a step."""
    microbatches = rows // data
    devices = data * tensor * pipeline
    passes = {"none": 6, "selective": 6.5, "full": 8}[recompute]
    flops = passes * model.params * model.sequence * rows / devices
    compute = flops / (_UTILISATION * chip.flops["bf16"])
    size = model.activation_bytes * model.sequence * model.width
    layers = model.layers / pipeline
    tensored = 4 * layers * collective_seconds("all-reduce", size, tensor, chip.inner)
    outer = chip.outer if devices > chip.per_node and chip.outer else chip.inner
    passed = 2 * collective_seconds("collective-permute", size, min(pipeline, 2), outer)
    working = compute + microbatches * (tensored + passed)
    bubble = working * (pipeline - 1) / microbatches
    nodes = max(1, min(data, devices // chip.per_node))
    nodes = nodes if data % nodes == 0 else 1
    link = chip.inner if chip.outer is None or nodes == 1 else chip.outer
    own = model.params * model.grad_bytes / (tensor * pipeline)
    times = 1.5 * microbatches if stage == 3 else 1.0
    sent = times * collective_seconds("all-reduce", own, data, link)
    hidden = min(sent, 0.5 * compute)
    return working + bubble + sent - hidden


def advise(
    sizes: Sizes, params: Any, batch: Any, chip: Chip, devices: int, rows: int
) -> tuple[str, ...]:
    """Sentences on how to divide devices that data parallelism alone cannot use.

    Args:
        sizes: The arrays.
        params: Shapes of the parameters.
        batch: Shapes of the batch.
        chip: What a device can do.
        devices: How many there are.
        rows: Rows of a step.
    """
    model = describe(params, sizes, batch)
    least = (
        sizes.param_bytes + sum(x.bytes for x in sizes.opt_state) + 4 * sizes.numbers
    ) / devices
    if model is None:
        return (
            f"The state alone takes {human(int(least))} of each device when all of it is split. "
            "The parameters do not look like a transformer's, so jdp knows no split: use more "
            "devices, jdp.layerwise in the loss, or a model axis of your own.",
        )
    found = splits(model, chip, devices, rows)
    if not found:
        more = math.ceil(least * devices / (0.7 * chip.memory))
        return (
            f"Nor does any split of {devices} devices into data, tensor and pipeline: states alone "
            f"take {human(int(least))} of each device. About {max(more, devices + 1)} devices of "
            f"{chip.title} or more would be needed, or smaller microbatches.",
        )
    best, said = found[0], [_sentence(model, found[0], chip)]
    alone = next((s for s in found if s.tensor == s.pipeline == 1), None)
    if alone is not None and alone is not best:
        said.append(
            "Data parallelism is enough if layers are gathered one at a time (jdp.layerwise in a "
            f"scan over layers): ZeRO stage {alone.stage} then takes about "
            f"{human(int(alone.memory))} and {alone.seconds:.3g} s a step."
        )
    return tuple(said)


def _sentence(model: Transformer, best: Split, chip: Chip) -> str:
    parts = []
    if best.tensor > 1:
        where = "within the node" if chip.platform == "gpu" else "along one side of the slice"
        parts.append(f"tensor parallelism of {best.tensor} {where}")
    if best.pipeline > 1:
        parts.append(f"a pipeline of {best.pipeline} across")
    how = " and ".join(parts) or "layers gathered one at a time (jdp.layerwise in a scan)"
    whole = memory_of_split(
        model, data=best.data * best.tensor * best.pipeline, stage=3, recompute="full"
    )
    why = (
        f"a row's activations and a gathered layer take {human(int(whole))} on a device that is "
        "split over data alone"
        if whole > chip.memory
        else "it is the quickest split that fits by the model in jdp.split_advice"
    )
    recompute = {"none": "", "full": " with recomputed layers"}.get(
        best.recompute, " with only products kept"
    )
    return (
        f"As a transformer of {model.layers} layers of width {model.width} it needs {how}, because "
        f"{why}: data {best.data} x tensor {best.tensor} x pipeline {best.pipeline}, ZeRO stage "
        f"{best.stage}{recompute}, takes about {human(int(best.memory))} of "
        f"{human(chip.memory)} and {best.seconds:.3g} s a step."
    )
