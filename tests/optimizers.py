"""Every transformation that the installed Optax exports, found in its modules, and home-made ones.

    optax, optax.contrib  --find-->  functions  --construct-->  transformations  --each-->  one

A function is called without arguments, or with `learning_rate=RATE` where it takes one without a
default. One that needs more has a row in `ROWS`; `REFUSED` are those that a training step cannot
serve. `each` runs many side by side, each on parameters of its own, in one compiled program:
nearly all the time of these tests is compiling.
"""

import functools
import inspect
import warnings

import home_made as made
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

RATE = 0.05
ADAM = optax.adam(RATE)
STEPS = 5

# On 8 devices: a matrix whose first dim divides, and one that is padded; one of which only the
# second dim divides, a vector that is padded, and a scalar.
TREES = (
    {"w": (16, 24), "odd": (10, 3)},
    {"w": (9, 32), "b": (7,), "s": ()},
)


def then_step(tx):
    """For what only transforms gradients: a step downhill after it."""
    return optax.chain(tx, optax.scale(-RATE))


def on(shapes, *ranks):
    return {name: len(shape) in ranks for name, shape in shapes.items()}


def only(tx, mask):
    """A transformation of some parameters; the others are frozen."""
    return optax.partition({True: tx, False: optax.set_to_zero()}, mask)


def some(shapes):
    return {name: name == "w" for name in shapes}


def every_other(step, **_):
    return step % 2 == 0


def fast(tx):
    """Of a gradient with respect to fast and slow parameters, the fast half, as lookahead wants."""
    return optax.GradientTransformation(tx.init, lambda u, s, p=None: tx.update(u.fast, s, p))


def as_matrices(updates):
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), updates)


def leaning():
    """One large singular value, far from the others: where two meet, the vectors are anyone's."""
    return optax.stateless_with_tree_map(lambda u, p: u + 10.0)


# Arguments that a function needs, from itself and the shapes of the parameters.
NEEDED = {
    "MultiSteps": lambda make, shapes: make(ADAM, 2).gradient_transformation(),
    "adaptive_grad_clip": lambda make, shapes: then_step(make(1.0)),
    "add_noise": lambda make, shapes: then_step(make(0.01, 0.55, key=jax.random.key(1))),
    "apply_if_finite": lambda make, shapes: make(ADAM, 3),
    "chain": lambda make, shapes: make(optax.clip_by_global_norm(1.0), ADAM),
    "clip": lambda make, shapes: then_step(make(1.5)),
    "clip_by_block_rms": lambda make, shapes: then_step(make(0.5)),
    "clip_by_global_norm": lambda make, shapes: then_step(make(0.5)),
    "conditionally_mask": lambda make, shapes: make(ADAM, every_other),
    "conditionally_transform": lambda make, shapes: then_step(make(optax.trace(0.9), every_other)),
    "ema": lambda make, shapes: then_step(make(0.9)),
    "flatten": lambda make, shapes: make(ADAM),
    "freeze": lambda make, shapes: then_step(make(some(shapes))),
    "inject_hyperparams": lambda make, shapes: make(optax.adamw)(optax.linear_schedule(0.1, 0, 9)),
    "inject_stateful_hyperparams": lambda make, shapes: make(optax.adamw)(learning_rate=RATE),
    "lookahead": lambda make, shapes: fast(make(ADAM, 2, 0.5)),
    "masked": lambda make, shapes: then_step(make(optax.scale_by_adam(), some(shapes))),
    "mechanize": lambda make, shapes: make(ADAM, s_init=0.01),
    "measure_with_ema": lambda make, shapes: optax.monitor({"ema": make(optax.tree.norm, 0.9)}),
    "monitor": lambda make, shapes: make({"norm": optax.tree.norm}),
    "multi_transform": lambda make, shapes: make({1: ADAM, 0: optax.sgd(RATE)}, some(shapes)),
    "named_chain": lambda make, shapes: make(("clip", optax.clip(0.9)), ("adam", ADAM)),
    "partition": lambda make, shapes: make({1: ADAM, 0: optax.set_to_zero()}, some(shapes)),
    "sam": lambda make, shapes: make(ADAM, optax.chain(optax.contrib.normalize(), optax.sgd(0.1))),
    "scale": lambda make, shapes: make(-RATE),
    "scale_by_schedule": lambda make, shapes: make(optax.linear_schedule(-RATE, 0, 9)),
    "schedule_free": lambda make, shapes: make(ADAM, RATE),
    "selective_transform": lambda make, shapes: make(ADAM, freeze_mask=some(shapes)),
    "snapshot": lambda make, shapes: then_step(make("norm", optax.tree.norm)),
    "split_real_and_imaginary": lambda make, shapes: make(ADAM),
    "stateless": lambda make, shapes: then_step(make(decayed)),
    "stateless_with_tree_map": lambda make, shapes: then_step(make(lambda u, p: u + 0.1 * p)),
    "trace": lambda make, shapes: then_step(make(0.9)),
    "with_extra_args_support": lambda make, shapes: make(ADAM),
    # Optax's own limits: a scalar makes the first two fail, and leaves the third as a vector;
    # Muon's kernel is for matrices alone.
    "sm3": lambda make, shapes: only(make(RATE), on(shapes, 1, 2)),
    "scale_by_sm3": lambda make, shapes: then_step(only(make(), on(shapes, 1, 2))),
    "scale_by_distance_over_gradients": lambda make, shapes: optax.chain(
        only(make(reps_rel=0.1), on(shapes, 1, 2)), optax.scale(-1.0)
    ),
    "scale_by_muon": lambda make, shapes: then_step(
        only(make(weight_dimension_numbers=as_matrices), on(shapes, 2))
    ),
    "dpsgd": lambda make, shapes: make(RATE, 1.0, 0.1, seed=0),
    "differentially_private_aggregate": lambda make, shapes: make(1.0, 0.1, key=0),
    "scale_by_backtracking_linesearch": lambda make, shapes: make(5),
    "scale_by_zoom_linesearch": lambda make, shapes: make(5),
}

# Arguments with which five steps say something: those that find a step size by themselves begin
# with one of 1e-6.
CHOSEN = {
    "adadelta": lambda make, shapes: make(10.0),
    "add_decayed_weights": lambda make, shapes: then_step(make(0.1)),
    "apply_every": lambda make, shapes: then_step(make(2)),
    "dadapt_adamw": lambda make, shapes: make(estim_lr0=0.01),
    "dog": lambda make, shapes: make(init_step=("heuristic", 0.1)),
    "keep_params_nonnegative": lambda make, shapes: optax.chain(optax.sgd(RATE), make()),
    "lars": lambda make, shapes: make(1.0, trust_coefficient=0.1),
    "momo": lambda make, shapes: make(0.1),  # would reach the optimum, and divide by what is left
    "noisy_sgd": lambda make, shapes: make(RATE, key=jax.random.key(0)),
    "polyak_sgd": lambda make, shapes: make(),
    "prodigy": lambda make, shapes: make(estim_lr0=0.01),
    # L-BFGS divides by differences of gradients: no tiny first step, in which they cancel.
    "scale_by_lbfgs": lambda make, shapes: optax.chain(
        make(scale_init_precond=False), optax.scale(-0.2)
    ),
    "scale_by_adadelta": lambda make, shapes: optax.chain(make(), optax.scale(-10.0)),
    "galore": lambda make, shapes: optax.chain(leaning(), make(RATE, rank=1)),
    "scale_by_galore": lambda make, shapes: then_step(optax.chain(leaning(), make(rank=1))),
}
ROWS = NEEDED | CHOSEN

# Those that a training step cannot serve, and what its refusal has to say.
REFUSED = {
    "differentially_private_aggregate": "aggregate .* is not private",
    "dpsgd": "differentially_private_aggregate .* is not private",
    "hutchinson_estimator_diag_hessian": "^hutchinson_estimator_diag_hessian, a tr.*obj_fn",
    "lbfgs": "^scale_by_zoom_linesearch, a tr.*value_fn",
    "measure_with_ema": "optax.monitor",
    "monitor": "optax.monitor",
    "scale_by_backtracking_linesearch": "^scale_by_backtracking_linesearch, a tr.*value_fn",
    "scale_by_zoom_linesearch": "^scale_by_zoom_linesearch, a tr.*value_fn",
    "sophia": "^hutchinson_estimator_diag_hessian, a tr.*obj_fn",
}


def decayed(updates, params):
    return jax.tree.map(lambda u, p: u + 0.1 * p, updates, params)


def makes_transformations(function):
    """Whether a function says that it returns a transformation, or a class that it has one."""
    if inspect.isclass(function):
        return hasattr(function, "gradient_transformation")
    try:
        returns = inspect.signature(function).return_annotation
        text = inspect.getsource(function) if returns is inspect.Signature.empty else str(returns)
    except (TypeError, ValueError, OSError):
        return False
    return "GradientTransformation" in text


def find(modules=(optax, optax.contrib, optax.transforms)):
    """Name and function of everything public that makes a transformation."""
    found = {}
    for module in modules:
        for name, function in sorted(vars(module).items()):
            public = not name.startswith("_") and callable(function)
            if public and function not in found.values() and makes_transformations(function):
                found[name if name not in found else f"{module.__name__}.{name}"] = function
    return found


def construct(name, function, shapes):
    """The transformation that a function makes."""
    parameters = inspect.signature(function).parameters
    rate = parameters.get("learning_rate")
    try:
        with warnings.catch_warnings(action="ignore"):  # of deprecation: it is exported still
            if name in ROWS:
                tx = ROWS[name](function, shapes)
            elif rate is not None and rate.default in (None, inspect.Parameter.empty):
                tx = function(learning_rate=RATE)
            else:
                tx = function() if rate is not None else then_step(function())
    except Exception as error:
        raise AssertionError(
            f"Optax exports {name}{inspect.signature(function)}, which cannot be called like that "
            f"({error}). Give it a row in tests/optimizers.py: arguments, or a reason to refuse it."
        ) from error
    assert isinstance(tx, optax.GradientTransformation), f"{name} made a {type(tx).__name__}"
    return tx


# -- Home-made ones, and compositions of Optax's.


def home_made(shapes):
    inject = optax.inject_hyperparams(optax.sgd)
    warmup = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6)
    return {
        "mean subtraction": then_step(made.mean_subtraction()),
        "norm of a tensor": then_step(made.tensor_norm()),
        "matrix products": then_step(made.matrix_products()),
        "noise": then_step(made.noise()),
        "along the tree": then_step(made.along_the_tree()),
        "median": then_step(made.clipped_at_the_median()),
        "factors": then_step(made.factors()),
        "clip, adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE)),
        "adamw, no decay of vectors": optax.adamw(RATE, mask=on(shapes, 2)),
        "schedule": optax.adamw(warmup),
        "frozen": optax.partition({1: optax.set_to_zero(), 0: optax.adamw(RATE)}, some(shapes)),
        "muon, adamw": optax.partition(
            {1: optax.contrib.muon(RATE), 0: optax.adamw(RATE)}, on(shapes, 2)
        ),
        "injected, some": only(inject(learning_rate=warmup), some(shapes)),
        "skip": optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), ADAM), 3),
    }


def transformations(shapes):
    """All that a training step should serve, by name."""
    found = {n: construct(n, f, shapes) for n, f in find().items() if n not in REFUSED}
    return found | home_made(shapes)


# -- Parameters and a loss for all of them at once.


def each(txs):
    """One transformation of many, each of its own part of the parameters."""
    txs = {name: optax.with_extra_args_support(tx) for name, tx in txs.items()}

    def noted(name, function, *args, **extra):
        try:
            return function(*args, **extra)
        except Exception as error:
            error.add_note(f"while working on {name}")
            raise

    def init(params):
        return {name: noted(name, tx.init, params[name]) for name, tx in txs.items()}

    def update(updates, state, params=None, *, value):
        value = value / len(txs)  # the mean of the losses stands for each
        new = {
            name: noted(name, _update, tx, updates[name], state[name], params[name], value)
            for name, tx in txs.items()
        }
        return {name: u for name, (u, _) in new.items()}, {name: s for name, (_, s) in new.items()}

    return optax.GradientTransformationExtraArgs(init, update)


def _update(tx, updates, state, params, value):
    try:
        return tx.update(updates, state, params, value=value)
    except TypeError as error:
        if "unexpected keyword argument 'value'" not in str(error):
            raise
    return tx.update(updates, state, params)  # optax.contrib.sam takes no extra arguments


def away_from_zero(shape, low, high, seed):
    """Numbers of both signs and of sizes between low and high."""
    rng = np.random.default_rng(seed)
    return np.float32(rng.choice([-1, 1], shape) * rng.uniform(low, high, shape))


def optima(shapes):
    return {k: away_from_zero(shape, 1.5, 2.5, 3) for k, shape in shapes.items()}


def initial(name, shapes):
    """The parameters of one transformation."""
    targets = optima(shapes)  # of the same sign, or a step might end just beside zero
    params = {
        k: np.abs(away_from_zero(t.shape, 0.05, 0.2, 1)) * np.sign(t) for k, t in targets.items()
    }
    return optax.LookaheadParams.init_synced(params) if name == "lookahead" else params


@functools.cache
def batches(columns):
    """One for each step, of 16 rows whose entries differ much.

    Each column has the mean 1 and the standard deviation 0.9, so that the loss of the whole batch
    is one function in all steps: differences of gradients, which L-BFGS divides by, are not noise.
    """
    rows = np.random.default_rng(2).uniform(-1, 1, (STEPS, 16, columns))
    rows -= rows.mean(axis=1, keepdims=True)
    return list(np.float32(1 + 0.9 * rows / rows.std(axis=1, keepdims=True)))


def loss_for(shapes):
    """The sum of everyone's loss: the square of a * p - t, for a row a of the batch.

    The gradient is mean(a**2) * p - t, with t at least 1.5 in size and the first term below 1 in
    all steps. So no entry of the whole batch's gradient comes near zero, where a sign, a root or
    Adam's ratio would make a difference of rounding a difference of results. Single rows have
    gradients of any sign.
    """
    targets = optima(shapes)

    def loss_fn(params, batch):
        trees = [getattr(tree, "fast", tree) for tree in params.values()]
        total = 0.0
        for column, (k, target) in enumerate(targets.items()):
            stacked = jnp.stack([tree[k] for tree in trees])
            a = batch[:, column].reshape(-1, *[1] * stacked.ndim)
            total += 0.5 * jnp.sum((a * stacked - target) ** 2) / batch.shape[0]
        return total

    return loss_fn
