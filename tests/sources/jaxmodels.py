"""Write models of Flax, their checkpoints in every layout, and their outputs. JAX's environment runs this file.

``python jaxmodels.py DIRECTORY`` writes, for each model, ``MODEL/LAYOUT/`` and ``MODEL/samples.npz``, which holds the
inputs and the outputs that the model itself computed in fp32, and ``MODEL/leaves.npz``, every leaf by its name.
"""

# mypy: ignore-errors
# JAX is not installed in the environment that checks types.

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

jax.config.update("jax_default_matmul_precision", "highest")


class Cnn(nn.Module):
    """Linen model of images [batch, height, width, channels]."""

    @nn.compact
    def __call__(self, x, train=False):
        for width in (8, 16):
            x = nn.Conv(width, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.relu(x)
        x = nn.Dense(32)(x.mean((1, 2)))
        return nn.Dense(10)(nn.relu(x))


class Block(nn.Module):
    """Linen model: self-attention with heads in their own axis, and a feed-forward part, over embedded tokens."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(32, 16, name="token_embed")(ids)
        y = nn.LayerNorm(name="norm1")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, name="attention")(y)
        y = nn.LayerNorm(name="norm2")(x)
        y = nn.Dense(64, name="up")(y)
        return x + nn.Dense(16, name="down")(nn.gelu(y))


class Mlp(nnx.Module):
    """NNX model; its second layer is bf16."""

    def __init__(self, rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.down = nnx.Linear(64, 10, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.norm(self.up(x))))


def scattered(tree, seed=0):
    """Return ``tree`` with random values, so that leaves differ: none is zero or one, as many are initially."""
    leaves, treedef = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    made = []
    for leaf in leaves:
        leaf = jnp.asarray(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            made.append(leaf)
            continue
        fan_in = max(1, leaf.size // leaf.shape[-1]) if leaf.ndim > 1 else 4
        made.append(jnp.asarray(rng.standard_normal(leaf.shape) / np.sqrt(fan_in), leaf.dtype))
    return jax.tree.unflatten(treedef, made)


def positive(stats):
    """Return ``stats`` with positive variances."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.abs(leaf) + 0.5 if "var" in str(path[-1]) else leaf, stats
    )


def named(tree, prefix=""):
    """Return the leaves by their keys joined with dots; bf16 as its bits, which numpy can store."""
    found = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if hasattr(value, "items"):
            found |= named(value, f"{name}.")
        else:
            array = np.asarray(value)
            found[name] = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    return found


def write(root, tree, samples):
    """Write ``tree`` in every layout."""
    root.mkdir(parents=True)
    np.savez(root / "samples.npz", **samples)
    np.savez(root / "leaves.npz", **named(tree))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "standard", tree)
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(root / "folders", tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as checkpointer:
        checkpointer.save(root / "zarr3", tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)) as checkpointer:
        checkpointer.save(root / "zarr3_folders", tree)
    with ocp.CheckpointManager(root / "managed") as manager:
        for step in (3, 20):
            changed = jax.tree.map(lambda leaf: leaf * 0, tree) if step == 3 else tree
            items = {"weights": ocp.args.StandardSave(changed), "meta": ocp.args.JsonSave({"step": step})}
            manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    with ocp.CheckpointManager(root / "single") as manager:
        manager.save(7, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    v1.save(root / "v1", tree)
    mesh = Mesh(np.array(jax.devices()).reshape(4), ("x",))

    def shard(leaf):
        spec = PartitionSpec("x") if leaf.ndim and leaf.shape[0] % 4 == 0 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "sharded", jax.tree.map(shard, tree))
    (root / "flax.msgpack").write_bytes(serialization.to_bytes(tree))


def main(root):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 12, 12, 3)).astype(np.float32)
    model = Cnn()
    variables = model.init(jax.random.key(0), x)
    variables = {
        "params": scattered(variables["params"]),
        "batch_stats": positive(scattered(variables["batch_stats"], 1)),
    }
    answer = np.asarray(model.apply(variables, x))
    write(root / "cnn", variables, {"x": x.transpose(0, 3, 1, 2), "logits": answer})

    ids = rng.integers(0, 32, (4, 7))
    block = Block()
    params = scattered(block.init(jax.random.key(0), ids)["params"], 2)
    write(root / "block", {"params": params}, {"ids": ids, "hidden": np.asarray(block.apply({"params": params}, ids))})

    flat = rng.standard_normal((4, 16)).astype(np.float32)
    mlp = Mlp(nnx.Rngs(0))
    mlp.eval()
    graph, state = nnx.split(mlp)
    pure = nnx.to_pure_dict(state)
    pure = positive(scattered(pure, 3))
    nnx.replace_by_pure_dict(state, pure)
    mlp = nnx.merge(graph, state)
    mlp.eval()
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, nnx.state(mlp))
    full = nnx.merge(graph, wide)
    full.eval()
    write(root / "mlp", pure, {"x": flat, "output": np.asarray(full(flat), np.float32)})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "mlp" / "nnx_state", state)

    trained = TrainState.create(apply_fn=block.apply, params=params, tx=optax.adam(1e-3))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "block" / "train_state", trained)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
