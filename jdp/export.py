"""Parameters as a safetensors file, for other programs to load, and back.

    params, of any placement  --export_params-->  one file of plain arrays by dotted names
    file  --import_params(like)-->  parameters where `like` lies

Nothing of the optimizer and nothing of the devices is in it. What layouts other frameworks give
their arrays is theirs to know: nothing is transposed or renamed.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.decisions import Decisions
from jdp.folder import CheckpointError
from jdp.manifest import Leaf, differences, flatten
from jdp.optional import library
from jdp.padded import logical, put
from jdp.replica import is_stored
from jdp.rows import agreed

# what safetensors reads back into NumPy
_KINDS = {"float": (16, 32, 64), "bfloat": (16,), "complex": (64,), "bool": ("",)}
_KINDS |= {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64)}
_DTYPES = {f"{kind}{bits}" for kind, sizes in _KINDS.items() for bits in sizes}


def export_params(params: Any, path: Any, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes parameters to a safetensors file.

    Names are the keys and positions on a leaf's path with dots between them: "layers.0.kernel".
    Parameters that differ by replica (`jdp.local_sgd`) are written at their mean. Of several
    processes, which all call it, the first one writes.

    Guarantees:
        - The values are the same bits.
        - The file is whole, or not there; one that was there before stays until then.

    Args:
        params: The parameters, split, padded or whole.
        path: The file.
        metadata: Texts to store in its header.

    Raises:
        ValueError: If two leaves have the same name or a dtype is unknown to the format, naming
            them.
        CheckpointError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> jdp.export_params({"layer": {"w": jnp.ones((3, 2))}}, path)
        >>> jdp.import_params(path, {"layer": {"w": np.zeros((3, 2), np.float32)}})
        {'layer': {'w': array([[1., 1.],
               [1., 1.],
               [1., 1.]], dtype=float32)}}
    """
    library = _safetensors()
    tree = _whole(logical(agreed(params)))
    arrays: dict[str, np.ndarray] = {}
    for path_, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name, where = _name(path_), jax.tree_util.keystr(path_)
        if name in arrays:
            raise ValueError(
                f"jdp.export_params: {where} would be called {name!r}, as another leaf is: one of "
                "them would be lost. Rename one."
            )
        if str(leaf.dtype) not in _DTYPES:
            raise ValueError(
                f"jdp.export_params: {where} is {leaf.dtype}, which others could not read from a "
                "safetensors file. Convert it first, x.astype(jnp.bfloat16) say."
            )
        arrays[name] = np.ascontiguousarray(leaf).reshape(np.shape(leaf))

    def write() -> None:
        part = f"{os.fspath(path)}.part"
        try:
            library.save_file(arrays, part, dict(metadata or {}))
            os.replace(part, path)
        except Exception as error:  # safetensors has its own for a full disk
            if os.path.exists(part):
                os.remove(part)
            raise CheckpointError(
                f"jdp.export_params could not write {path}: {error}. What was there still is."
            ) from error

    Decisions("jdp.export_params", CheckpointError).first(write)


def import_params(path: Any, like: Any) -> Any:
    """Reads parameters from a safetensors file to where `like` lies.

    Args:
        path: The file, such as `export_params` wrote; each process reads it.
        like: Parameters, or shapes: those with shardings get arrays there, others NumPy arrays.

    Returns:
        The parameters, in the structure of `like`.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If it cannot be read.
        ValueError: If it holds other parameters, saying what differs.
    """
    library = _safetensors()
    if not os.path.exists(path):
        raise FileNotFoundError(f"jdp.import_params: {path} does not exist.")
    try:
        found = library.load_file(path)
    except Exception as error:
        raise CheckpointError(
            f"jdp.import_params cannot read {path}: {error}. It was cut, or is no safetensors file."
        ) from error
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(like, is_leaf=is_stored)[0]]
    leaves, likes = flatten(like)
    names = [_name(path) for path in paths]
    wanted = [leaf._replace(name=(name,)) for leaf, name in zip(leaves, names, strict=True)]
    order = [name for name in names if name in found] + sorted(set(found) - set(names))
    saved = [Leaf(n, (n,), found[n].shape, str(found[n].dtype)) for n in order]
    if lines := differences(saved, wanted):
        text = "\n".join(lines).replace("the checkpoint", "the file")
        raise ValueError(
            f"jdp.import_params: {path} holds other parameters than `like`:\n{text}\n"
            "Give `like` the names and shapes of the file, and rename afterwards."
        )
    values = [_put(found[name], leaf) for name, leaf in zip(names, likes, strict=True)]
    return jax.tree.structure(like, is_leaf=is_stored).unflatten(values)


def _put(array: np.ndarray, like: Any) -> Any:
    return array if getattr(like, "sharding", None) is None else put(array, like)


def _safetensors() -> Any:
    use = "jdp.export_params and import_params use safetensors"
    return library("safetensors.numpy", use, "checkpoints", "safetensors")


def _name(path: Any) -> str:
    """Keys and positions with dots between them."""
    parts = []
    for part in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(part, attribute):
                parts.append(str(getattr(part, attribute)))
                break
    return ".".join(parts) or "value"


def _whole(tree: Any) -> Any:
    """Host arrays; what is split over processes is put together first."""

    def whole(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            assert isinstance(x.sharding, NamedSharding)
            x = _gather(NamedSharding(x.sharding.mesh, P()))(x)
        return np.asarray(x)

    return jax.tree.map(whole, tree)


@functools.cache
def _gather(place: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=place)
