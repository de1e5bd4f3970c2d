"""What a checkpoint says about itself, and in words how it differs from what is wanted.

    tree  --flatten-->  leaves and their values  --Manifest-->  text, sealed  --read-->  Manifest
    saved leaves, wanted leaves  --pair-->  pairs, or a difference that people can read

A leaf is told by its path, its logical shape and its dtype; how it was padded, split or staged is
no part of it. Nothing here touches a file or a device.
"""

import difflib
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.replica import is_per_replica, is_stored

FORMAT = 1
_NAMED = 8  # leaves of each kind of difference that a message lists


class Leaf(NamedTuple):
    """A leaf of a saved tree.

    Attributes:
        path: Where it is, such as ".params['w']".
        name: The names on that path, without positions in tuples and without what wraps another
            optimizer state: the same under any ZeRO stage.
        shape: The logical shape, of one replica.
        dtype: The dtype.
        replicas: Rows that were kept, one for each replica; `None` for what replicas share.
        key: Implementation of a typed random key, whose data is what is stored; else `None`.
    """

    path: str
    name: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    replicas: int | None = None
    key: str | None = None

    @property
    def kind(self) -> tuple[tuple[int, ...], str, str | None]:
        """What two leaves must have in common for one to take the other's place."""
        return self.shape, self.dtype, self.key

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array that is stored."""
        return self.shape if self.replicas is None else (self.replicas, *self.shape)

    def __str__(self) -> str:
        return f"{self.path} {_say(self)}"


class Manifest(NamedTuple):
    """What is written last, and makes a folder of arrays a checkpoint.

    Attributes:
        step: The training step.
        leaves: What it holds.
        fingerprint: Of the leaves: equal for states that can take each other's place.
        data: Position in the data, as it was given.
        metrics: Numbers by name, as they were given.
        made_by: Versions, mesh, devices, processes, ZeRO stage, time.
        files: Size in bytes and CRC-32 of each file, by its path.
    """

    step: int
    leaves: tuple[Leaf, ...]
    fingerprint: str
    data: Any
    metrics: dict[str, float]
    made_by: dict[str, Any]
    files: dict[str, tuple[int, int]]

    def to_text(self) -> str:
        """JSON, sealed with its own SHA-256."""
        body = self._asdict() | {"format": FORMAT, "leaves": [list(x) for x in self.leaves]}
        return json.dumps(body | {"seal": _seal(body)}, indent=1)

    @classmethod
    def from_text(cls, text: str) -> "Manifest":
        """The inverse.

        Raises:
            ValueError: If the text was cut or changed, or is of a later format.
        """
        try:
            body = json.loads(text)
            seal, form = body.pop("seal"), body["format"]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"its manifest cannot be read ({error})") from None
        if seal != _seal(body):
            raise ValueError("its manifest was changed: its contents and its checksum disagree")
        if body.pop("format") != FORMAT:
            raise ValueError(f"it is of format {form}, which this version of jdp does not know")
        body["leaves"] = tuple(
            Leaf(path, tuple(name), tuple(shape), *rest)
            for path, name, shape, *rest in body["leaves"]
        )
        body["files"] = {name: tuple(what) for name, what in body["files"].items()}
        return cls(**body)


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def flatten(tree: Any) -> tuple[list[Leaf], list[Any]]:
    """The leaves of a tree of arrays or shapes, and what stands there, stored as it is stored.

    Raises:
        TypeError: If something is no array, naming it.
    """
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored)[0]
    return [_leaf(path, value) for path, value in found], [value for _, value in found]


def _leaf(path: Any, value: Any) -> Leaf:
    where = jax.tree_util.keystr(path) or "(the whole value)"
    if not hasattr(value, "dtype") and not isinstance(value, (bool, int, float, complex)):
        raise TypeError(
            f"jdp.Checkpoints: {where} is a {type(value).__name__}, and a checkpoint holds arrays. "
            "Leave it out of the state, or give it as `data`, which takes what JSON takes."
        )
    dtype: Any = getattr(value, "dtype", None) or jnp.result_type(value)
    shape, key, replicas = tuple(jnp.shape(value)), None, None
    if is_per_replica(value):
        (replicas, *rest) = shape
        shape = tuple(rest)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        key, dtype = _impl(value), np.dtype(np.uint32)
    return Leaf(where, _names(path), shape, str(dtype), replicas, key)


def _impl(keys: Any) -> str:
    """The name of a random key's implementation, of an array or a shape."""
    found: list[str] = []
    jax.eval_shape(lambda keys: found.append(str(jax.random.key_impl(keys))), keys)
    return found[0]


def _names(path: Any) -> tuple[str, ...]:
    """The names on a path; chains and wrappers come and go with the stage, and are left out."""
    names = []
    for part in path:
        if isinstance(part, jax.tree_util.SequenceKey):
            continue
        name = str(part.name if isinstance(part, jax.tree_util.GetAttrKey) else part.key)
        if name != "inner_state" or not isinstance(part, jax.tree_util.GetAttrKey):
            names.append(name)
    return tuple(names)


def fingerprint(leaves: Sequence[Leaf]) -> str:
    """Equal for trees of which one can be restored into the other."""
    text = json.dumps([[leaf.name, leaf.kind] for leaf in leaves])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def only(leaves: Sequence[Leaf], parts: Sequence[str]) -> list[int]:
    """Numbers of the leaves that lie in one of these fields of the tree."""
    return [i for i, leaf in enumerate(leaves) if leaf.name and leaf.name[0] in parts]


def differences(saved: Sequence[Leaf], wanted: Sequence[Leaf]) -> list[str]:
    """Lines that tell what is missing, what is unexpected and what is of another kind.

    Leaves are paired in their order, by name; `[]` if each has its counterpart of the same kind.
    """
    missing: list[Leaf] = []
    unexpected: list[Leaf] = []
    others: list[str] = []
    names = [leaf.name for leaf in saved], [leaf.name for leaf in wanted]
    if names[0] == names[1]:  # as a rule, and difflib takes long over many alike
        blocks = [("equal", 0, len(saved), 0, len(wanted))]
    else:
        blocks = difflib.SequenceMatcher(None, *names, autojunk=False).get_opcodes()
    for tag, i, i_end, j, j_end in blocks:
        if tag == "equal":
            pairs = zip(saved[i:i_end], wanted[j:j_end], strict=True)
            others += [
                f"{old.path}: saved {_say(old)}, wanted {_say(new)}"
                for old, new in pairs
                if old.kind != new.kind
            ]
        else:
            missing += wanted[j:j_end]
            unexpected += saved[i:i_end]
    return [
        *_lines("wanted, but not in the checkpoint", [str(leaf) for leaf in missing]),
        *_lines("in the checkpoint, but not wanted", [str(leaf) for leaf in unexpected]),
        *_lines("of another shape or dtype", others),
    ]


def _lines(what: str, found: list[str]) -> list[str]:
    if not found:
        return []
    rest = [f"    and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return [f"  {what}:", *(f"    {line}" for line in found[:_NAMED]), *rest]


def _say(leaf: Leaf) -> str:
    if leaf.key:
        return f"{leaf.key} random key of shape {leaf.shape}"
    return f"{leaf.dtype} of shape {leaf.shape}"
