"""Runs the real Orbax on JAX's CPU devices in a process of its own, and tells what it restored.

As a module: `run_orbax` starts the process, `needs_orbax` skips a test where Orbax is not installed, and
`needs_any_orbax` where no environment has it. As a script: what runs there.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Leaf", "digest_of", "needs_any_orbax", "needs_orbax", "run_orbax"]

NUM_DEVICES = 8
_ANSWER = "answer: "

Leaf = tuple[str, tuple[int, ...], str]
"""dtype, shape, and digest of the bytes."""

_NOTE = Path(__file__).parents[2] / "build" / "orbax-python"
"""Where `./dev test` says which Python has Orbax: torch_xla would import a JAX that it finds in its own environment."""


def _orbax_python() -> str | None:
    if all(importlib.util.find_spec(name) is not None for name in ("jax", "orbax")):
        return sys.executable
    found = _NOTE.read_text().strip() if _NOTE.exists() else ""
    return found if Path(found).is_file() else None


needs_orbax = pytest.mark.skipif(
    _orbax_python() != sys.executable, reason="orbax-checkpoint is not installed in this environment"
)
needs_any_orbax = pytest.mark.skipif(
    _orbax_python() is None, reason="orbax-checkpoint is in no environment; ./dev test builds one"
)


def digest_of(data: bytes) -> str:
    """Return the digest by which leaves are compared."""
    return hashlib.sha256(data).hexdigest()[:16]


def run_orbax(*requests: dict[str, Any], timeout_secs: float = 90.0) -> list[Any]:
    """Do requests in the one process of this session, and return what each gave: {"error": text}, or a result as JSON.

    Each request names a function below by `do`, and its arguments. The process starts with the first request, takes the
    others as they come, and ends with ours.
    """
    process = _running()
    return [_ask(process, request, timeout_secs) for request in requests]


@functools.cache
def _running() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [str(_orbax_python()), "-P", str(Path(__file__).resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        },
        text=True,
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.kill()
    process.wait()
    process.stdout.close()


def _ask(process: subprocess.Popen[str], request: dict[str, Any], timeout_secs: float) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(timeout_secs, process.kill)
    timer.start()
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith(_ANSWER):
                return json.loads(line.removeprefix(_ANSWER))
    finally:
        timer.cancel()
    _running.cache_clear()
    raise AssertionError(f"the process of Orbax ended, or took more than {timeout_secs:g} s for {request}")


# From here on: what runs in that process.


def _describe(tree: Any) -> Any:
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    def leaf(value: Any) -> Any:
        if isinstance(value, str):
            return value
        array = np.asarray(value)
        kind = "jax" if isinstance(value, jax.Array) else type(value).__name__
        return {
            "kind": kind,
            "dtype": str(array.dtype),
            "shape": list(array.shape),
            "digest": digest_of(np.ascontiguousarray(array).tobytes()),
            "num_devices": len(value.sharding.device_set) if isinstance(value, jax.Array) else 0,
        }

    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(_key(key) for key in path): leaf(value) for path, value in flat}


def _key(key: Any) -> str:
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def standard(path: str) -> Any:
    """Restore one item by StandardCheckpointer."""
    import orbax.checkpoint as ocp  # noqa: PLC0415

    return _describe(ocp.StandardCheckpointer().restore(path))


def pytree(path: str) -> Any:
    """Restore one item by PyTreeCheckpointer."""
    import orbax.checkpoint as ocp  # noqa: PLC0415

    return _describe(ocp.PyTreeCheckpointer().restore(path))


def v1(path: str) -> Any:
    """Load all items of a step by the v1 interface."""
    import orbax.checkpoint.experimental.v1 as ocp  # noqa: PLC0415

    return {name: _describe(item) for name, item in ocp.load_checkpointables(path).items()}


def v1_item(path: str, item: str) -> Any:
    """Load one item of a step by the v1 interface."""
    import orbax.checkpoint.experimental.v1 as ocp  # noqa: PLC0415

    return _describe(ocp.load(path, checkpointable_name=item))


def manager(root: str, step: int | None = None) -> Any:
    """Look at a root and restore a step by CheckpointManager."""
    import orbax.checkpoint as ocp  # noqa: PLC0415

    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(root, options=options) as found:
        chosen = found.latest_step() if step is None else step
        items = found.restore(chosen)
        metadata = found.item_metadata(chosen)
        return {
            "all_steps": list(found.all_steps()),
            "latest_step": found.latest_step(),
            "best_step": found.best_step(),
            "metrics": found.metrics(chosen),
            "items": {name: _describe(item) for name, item in items.items()},
            "metadata": sorted(name for name, item in metadata.items() if item is not None),
        }


def mesh(path: str, shapes: dict[str, list[int]], dtypes: dict[str, str]) -> Any:
    """Restore one item onto a mesh of 2 x 4 devices, split along every dimension that can be."""
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    import orbax.checkpoint as ocp  # noqa: PLC0415
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: PLC0415

    devices = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    target = {}
    for name, shape in shapes.items():
        axes = [
            axis if size % count == 0 and size else None for size, axis, count in zip(shape, "ba", (4, 2), strict=False)
        ]
        sharding = NamedSharding(devices, PartitionSpec(*axes))
        target[name] = jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtypes[name]), sharding=sharding)
    return _describe(ocp.StandardCheckpointer().restore(path, target))


def write(root: str, name: str) -> Any:
    """Write a known tree, sharded over a mesh of 2 x 4 devices, the way that `name` says; return its leaves."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    import orbax.checkpoint as ocp  # noqa: PLC0415
    import orbax.checkpoint.experimental.v1 as new  # noqa: PLC0415
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: PLC0415

    devices = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))

    def make(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Any:
        data = (jnp.arange(int(np.prod(shape))) % 251).reshape(shape).astype(dtype)
        return jax.device_put(data, NamedSharding(devices, PartitionSpec(*axes)))

    params = {
        "w": make((8, 12), jnp.float32, "a", "b"),
        "b": make((7,), jnp.bfloat16),
        "small": make((4, 4), jnp.float8_e4m3fn, "a"),
        "count": make((5,), jnp.int32),
        "noise": jax.random.normal(jax.random.key(0), (64, 64)),  # too large, and too random, for OCDBT to keep inline
        "zeros": jnp.zeros((6,), jnp.float32),
    }
    tree = {"params": params, "list": [np.ones(2), {"x": 1}], "step": 7, "lr": 2.5, "empty": {}, "a.b": np.zeros(1)}
    kinds = {"ocdbt-zarr3": (True, True), "ocdbt-zarr2": (True, False), "files-zarr3": (False, True)}
    kinds["files-zarr2"] = (False, False)
    if name in kinds:
        ocdbt, zarr3 = kinds[name]
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
        ocp.Checkpointer(handler).save(root, {**tree, "text": "实验"})
    elif name == "manager":
        with ocp.CheckpointManager(root) as made:
            made.save(3, args=ocp.args.StandardSave(tree))
    elif name == "items":
        with ocp.CheckpointManager(root) as made:
            items = ocp.args.Composite(one=ocp.args.StandardSave(tree), two=ocp.args.JsonSave({"n": [1, None]}))
            made.save(3, args=items, metrics={"loss": 1.5})
    else:
        new.save(root, tree)
    return _describe(tree)


def _main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            answer = globals()[do](**request)
        except Exception as error:  # noqa: BLE001 - the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(f"{_ANSWER}{json.dumps(answer)}", flush=True)  # noqa: T201


if __name__ == "__main__":
    _main()
