"""Transformations that people write themselves, of whole trees, whole arrays and random numbers."""

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree


def mean_subtraction():
    """From every entry the mean over all parameters."""

    def update(updates, params):
        del params
        mean = sum(map(jnp.sum, jax.tree.leaves(updates))) / optax.tree.size(updates)
        return jax.tree.map(lambda u: u - 0.5 * mean, updates)

    return optax.stateless(update)


def tensor_norm():
    return optax.stateless_with_tree_map(lambda u, p: u / (jnp.linalg.norm(u.ravel()) + 1e-6))


def matrix_products():
    """A step of an iteration towards the nearest orthogonal matrix."""

    def one(u, p):
        del p
        if u.ndim < 2:
            return u
        u = u / jnp.linalg.norm(u)
        return 1.5 * u - 0.5 * u @ u.T @ u

    return optax.stateless_with_tree_map(one)


def noise():
    """Noise from a key in the state, another for each leaf."""

    def update(updates, key, params=None):
        del params
        key, *keys = jax.random.split(key, 1 + len(jax.tree.leaves(updates)))
        keys = jax.tree.unflatten(jax.tree.structure(updates), keys)
        return jax.tree.map(lambda u, k: u + jax.random.normal(k, u.shape), updates, keys), key

    return optax.GradientTransformation(lambda params: jax.random.key(7), update)


def along_the_tree():
    """All leaves as one vector, in which each entry is given what its neighbours have."""

    def update(updates, params):
        del params
        vector, back = ravel_pytree(updates)
        return back(vector + 0.3 * jnp.roll(vector, 1) + 0.01 * jnp.cumsum(vector))

    return optax.stateless(update)


def clipped_at_the_median():
    return optax.stateless_with_tree_map(
        lambda u, p: jnp.clip(u, -jnp.median(jnp.abs(u)), jnp.median(jnp.abs(u)))
    )


def factors():
    """State that mirrors no parameter: a mean for each row, and one for each column."""

    def init(params):
        return [(jnp.zeros(p.shape[:1]), jnp.zeros(p.shape[1:])) for p in jax.tree.leaves(params)]

    def update(updates, state, params=None):
        del params
        leaves, treedef = jax.tree.flatten(updates)
        new = []
        for i, (u, (rows, columns)) in enumerate(zip(leaves, state, strict=True)):
            if u.ndim == 2:
                rows = 0.9 * rows + 0.1 * jnp.mean(u**2, axis=1)
                columns = 0.9 * columns + 0.1 * jnp.mean(u**2, axis=0)
                leaves[i] = u / jnp.sqrt(jnp.outer(rows, columns) / jnp.mean(rows) + 1e-6)
            new.append((rows, columns))
        return treedef.unflatten(leaves), new

    return optax.GradientTransformation(init, update)
