"""What chips and the links between them can do: one table, each number with its source.

    "h100", or a device's kind  --find_chip-->  Chip: FLOP/s, memory, links

In: a name. Out: figures. Nothing is measured here and nothing of JAX is imported; links that were
measured on the machine at hand override these wherever a function takes `links`. Bandwidths are
the makers' peaks, so programs come close to them at best; times made from them are the least.
"""

from typing import NamedTuple

_GiB = 2**30


class Link(NamedTuple):
    """How a device reaches others.

    Attributes:
        bytes_per_s: Bytes that each device sends in a second, and as many that it receives.
        latency_s: Seconds until the first byte of a message arrives.
        source: Where the figures come from, in words.
    """

    bytes_per_s: float
    latency_s: float
    source: str


class Chip(NamedTuple):
    """A kind of device.

    Attributes:
        name: As targets name it, such as "h100".
        title: In full.
        platform: "gpu", "tpu" or "cpu".
        kinds: What JAX calls it (`device.device_kind`).
        flops: Peak dense FLOP/s by dtype: "bf16", "f32", and "f16" and "f8" where there.
        memory: Bytes that programs can use.
        memory_bytes_per_s: Bytes read or written in a second.
        per_node: Devices joined by `inner`; of a TPU, the chips of the largest slice.
        inner: Link within a node, or within a TPU slice.
        outer: Link between nodes or slices, for each device; `None` if there is none.
        host: Link between a device and the memory of its host.
        sources: Where the other figures come from, in words.
    """

    name: str
    title: str
    platform: str
    kinds: tuple[str, ...]
    flops: dict[str, float]
    memory: int
    memory_bytes_per_s: float
    per_node: int
    inner: Link
    outer: Link | None
    host: Link
    sources: tuple[str, ...]


# NCCL, src/graph/tuning.cc: a ring's hop with the LL128 protocol takes 1.9 us over NVLink and
# 4.0 us over the network.
_NVLINK_S, _NETWORK_S, _PCIE_S = 1.9e-6, 4.0e-6, 1e-5
# J. Austin et al., "How to Scale Your Model" (2025): a hop between chips takes about 1 us.
_ICI_S, _DCN_S = 1e-6, 1e-5

# Besides the programs' own memory a GPU holds the CUDA context, cuBLAS workspaces and NCCL buffers.
_CUDA_TAKES = 2 * _GiB


def _gpu(
    name: str,
    title: str,
    kinds: tuple[str, ...],
    *,
    flops: dict[str, float],
    memory: int,
    memory_bytes_per_s: float,
    nvlink: float,
    network: float,
    pcie: float,
    per_node: int,
    sources: tuple[str, ...],
) -> Chip:
    return Chip(
        name,
        title,
        "gpu",
        kinds,
        flops,
        memory - _CUDA_TAKES,
        memory_bytes_per_s,
        per_node,
        Link(nvlink, _NVLINK_S, f"{sources[0]}, NVLink one way; NCCL's tuning table"),
        Link(network, _NETWORK_S, f"{sources[1]}, one adapter's share; NCCL's tuning table"),
        Link(pcie, _PCIE_S, f"{sources[0]}, PCIe x16 one way"),
        (
            *sources,
            "2 GiB taken off for CUDA's context, cuBLAS and NCCL. JAX sets aside 75 % of the "
            "memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says more.",
        ),
    )


def _tpu(
    name: str,
    title: str,
    kinds: tuple[str, ...],
    *,
    bf16: float,
    memory: float,
    memory_bytes_per_s: float,
    ici: float,
    dcn: float,
    pcie: float,
    pod: int,
) -> Chip:
    docs = f"Google Cloud documentation, {title}"
    return Chip(
        name,
        title,
        "tpu",
        kinds,
        # libtpu multiplies float32 in three passes of bfloat16 only if asked for more precision;
        # by default it rounds to bfloat16
        {"bf16": bf16, "f32": bf16},
        int(memory * _GiB),
        memory_bytes_per_s,
        pod,
        Link(ici, _ICI_S, f"{docs}: ICI of a chip, one way, all its links together"),
        Link(dcn, _DCN_S, f"{docs}: data center network of a host, shared by its chips"),
        Link(pcie, _PCIE_S, 'J. Austin et al., "How to Scale Your Model", 2025: PCIe'),
        (docs, "What libtpu lets programs use is named in its out-of-memory errors."),
    )


_CHIPS = (
    _gpu(
        "v100",
        "NVIDIA V100 SXM3 32 GB",
        ("Tesla V100-SXM3-32GB", "Tesla V100-SXM2-32GB"),
        flops={"f16": 125e12, "bf16": 15.7e12, "f32": 15.7e12},
        memory=32 * _GiB,
        memory_bytes_per_s=900e9,
        nvlink=150e9,
        network=6.25e9,
        pcie=16e9,
        per_node=16,
        sources=("NVIDIA V100 data sheet", "NVIDIA DGX-2 data sheet: 8 x 100 Gbit/s for 16 GPUs"),
    ),
    _gpu(
        "a100",
        "NVIDIA A100 SXM 80 GB",
        ("NVIDIA A100-SXM4-80GB",),
        flops={"bf16": 312e12, "f16": 312e12, "f32": 19.5e12},
        memory=84942979072,
        memory_bytes_per_s=2039e9,
        nvlink=300e9,
        network=25e9,
        pcie=32e9,
        per_node=8,
        sources=("NVIDIA A100 data sheet", "NVIDIA DGX A100 data sheet: 8 x 200 Gbit/s"),
    ),
    _gpu(
        "h100",
        "NVIDIA H100 SXM 80 GB",
        ("NVIDIA H100 80GB HBM3",),
        flops={"bf16": 989e12, "f16": 989e12, "f8": 1979e12, "f32": 67e12},
        memory=84942979072,
        memory_bytes_per_s=3352e9,
        nvlink=450e9,
        network=50e9,
        pcie=64e9,
        per_node=8,
        sources=("NVIDIA H100 data sheet", "NVIDIA DGX H100 data sheet: 8 x 400 Gbit/s"),
    ),
    _gpu(
        "h200",
        "NVIDIA H200 SXM 141 GB",
        ("NVIDIA H200",),
        flops={"bf16": 989e12, "f16": 989e12, "f8": 1979e12, "f32": 67e12},
        memory=150754820096,
        memory_bytes_per_s=4917e9,
        nvlink=450e9,
        network=50e9,
        pcie=64e9,
        per_node=8,
        sources=("NVIDIA H200 data sheet", "NVIDIA DGX H200 data sheet: 8 x 400 Gbit/s"),
    ),
    _tpu(
        "v4",
        "TPU v4",
        ("TPU v4",),
        bf16=275e12,
        memory=30.75,
        memory_bytes_per_s=1228e9,
        ici=300e9,
        dcn=6.25e9,
        pcie=16e9,
        pod=4096,
    ),
    _tpu(
        "v5e",
        "TPU v5e",
        ("TPU v5 lite", "TPU v5e"),
        bf16=197e12,
        memory=15.75,
        memory_bytes_per_s=819e9,
        ici=200e9,
        dcn=3.125e9,
        pcie=16e9,
        pod=256,
    ),
    _tpu(
        "v5p",
        "TPU v5p",
        ("TPU v5", "TPU v5p"),
        bf16=459e12,
        memory=95.74,
        memory_bytes_per_s=2765e9,
        ici=600e9,
        dcn=6.25e9,
        pcie=16e9,
        pod=8960,
    ),
    _tpu(
        "v6e",
        "TPU v6e",
        ("TPU v6 lite", "TPU v6e"),
        bf16=918e12,
        memory=31.25,
        memory_bytes_per_s=1600e9,
        ici=400e9,
        dcn=12.5e9,
        pcie=32e9,
        pod=256,
    ),
    Chip(
        "cpu",
        "a CPU, as a placeholder",
        "cpu",
        ("cpu",),
        {"bf16": 2e10, "f32": 5e10},
        4 * _GiB,
        1e10,
        1024,
        # 10 MB a device, all-reduced among 8 emulated devices on two cores, took 22 ms
        Link(0.8e9, 1e-4, "a placeholder: emulated devices share the cores; measure your own"),
        Link(0.6e9, 1e-4, "a placeholder: processes on one machine; measure your own"),
        Link(5e9, 1e-6, "a placeholder: device and host are one memory"),
        ("A placeholder of the order of two cores of a server; measure your own.",),
    ),
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in _CHIPS}
"""Every kind of device that figures are known of, by name."""


def find_chip(device_kind: str) -> Chip | None:
    """The figures of a device.

    Args:
        device_kind: What JAX calls it, `device.device_kind`, or a name of `CHIPS`.

    Returns:
        The chip; `None` if it is not in the table.

    Example:
        >>> find_chip("TPU v5 lite").name, find_chip("abacus")
        ('v5e', None)
    """
    if chip := CHIPS.get(device_kind):
        return chip
    return next((chip for chip in _CHIPS if device_kind in chip.kinds), None)
