"""What Orbax restores from a step, told leaf by leaf. A program, run in a process of its own; nothing imports it.

The only code of safepoint that imports JAX and Orbax. It is started by its path, so that it imports nothing of
safepoint: neither torch nor what opens devices. It reads requests from its input, a line each, and answers on its
output.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH_BYTES = 256 << 20
"""How much is restored at once, unless one leaf alone is larger."""


def describe(name: str, value: Any) -> dict[str, Any]:
    """Return what a restored leaf is."""
    import numpy as np  # noqa: PLC0415 - not before it is known that everything is installed
    import xxhash  # noqa: PLC0415

    if isinstance(value, str):
        return {"name": name, "text": value}
    array = np.ascontiguousarray(value)
    data = array.reshape(-1).view(np.uint8)
    shape = list(np.shape(value))
    return {"name": name, "dtype": str(array.dtype), "shape": shape, "digest": xxhash.xxh3_128_hexdigest(data.data)}


def key_text(key: Any) -> str:
    """Return a key of a path in a tree of JAX."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def num_bytes(leaf: Any) -> int:
    """Return the size of a leaf by its metadata."""
    import numpy as np  # noqa: PLC0415

    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return 0 if shape is None or dtype is None else int(np.prod(shape)) * np.dtype(dtype).itemsize


def batches(leaves: list[Any]) -> Iterator[list[int]]:
    """Yield the indices of leaves that are restored together."""
    batch: list[int] = []
    total = 0
    for index, leaf in enumerate(leaves):
        size = num_bytes(leaf)
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += size
    if batch:
        yield batch


class Tree:
    """One item of arrays, numbers and texts."""

    def __init__(self, path: str) -> None:
        import jax  # noqa: PLC0415, TID251 - here, and nowhere else
        import orbax.checkpoint as ocp  # noqa: PLC0415, TID251

        self._jax, self._ocp = jax, ocp
        self._path = path
        self._checkpointer = ocp.PyTreeCheckpointer()
        found = self._checkpointer.metadata(path).item_metadata.tree
        keyed, self._structure = jax.tree_util.tree_flatten_with_path(found)
        self.names = [".".join(map(key_text, keys)) for keys, _ in keyed]
        self.leaves = [leaf for _, leaf in keyed]

    def restore(self, wanted: list[int]) -> list[Any]:
        """Return some leaves, as arrays of numpy."""
        unflatten = self._jax.tree_util.tree_unflatten
        chosen = set(wanted)
        places = [leaf if index in chosen else self._ocp.PLACEHOLDER for index, leaf in enumerate(self.leaves)]
        arguments = self._ocp.args.PyTreeRestore(
            item=unflatten(self._structure, places),
            restore_args=unflatten(self._structure, [self._ocp.RestoreArgs() for _ in places]),
        )
        restored = self._jax.tree_util.tree_leaves(self._checkpointer.restore(self._path, args=arguments))
        return [restored[index] for index in wanted]


def read_tree(path: str) -> Iterator[dict[str, Any]]:
    """Yield what each leaf of an item is, or why it cannot be restored."""
    tree = Tree(path)
    for batch in batches(tree.leaves):
        try:
            values = tree.restore(batch)
        except Exception:  # noqa: BLE001 - found out below, leaf by leaf, which one it is
            yield from (read_one(tree, index) for index in batch)
            continue
        yield from (describe(tree.names[index], value) for index, value in zip(batch, values, strict=True))


def read_one(tree: Tree, index: int) -> dict[str, Any]:
    """Return what one leaf is, or why it cannot be restored."""
    try:
        return describe(tree.names[index], tree.restore([index])[0])
    except Exception as error:  # noqa: BLE001 - the answer
        return {"name": tree.names[index], "error": f"{type(error).__name__}: {error}"}


def read_json(path: str) -> Iterator[dict[str, Any]]:
    """Yield the value of an item without arrays."""
    import orbax.checkpoint as ocp  # noqa: PLC0415, TID251

    yield {"name": "", "json": ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(path)}


def look_at_root(root: str, step: int) -> dict[str, Any]:
    """Return what Orbax's manager says of the root, and of the metrics of a step."""
    import orbax.checkpoint as ocp  # noqa: PLC0415, TID251

    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        steps = [int(one) for one in manager.all_steps()]
        return {"steps": steps, "metrics": manager.metrics(step) if step in steps else None}


def answer(request: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell all that Orbax makes of one step."""
    root, step = request["root"], request["step"]
    try:
        if root is not None:
            tell({"item": None, **look_at_root(root, step)})
    except Exception as error:  # noqa: BLE001 - the answer
        tell({"item": None, "error": f"{type(error).__name__}: {error}"})
    for item, layout in request["items"].items():
        read = read_json if layout == "json" else read_tree
        try:
            for told in read(os.path.join(request["directory"], item)):
                tell({"item": item, **told})
        except Exception as error:  # noqa: BLE001 - the answer
            tell({"item": item, "error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Answer requests until there are none."""
    # What libraries print must not get into the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        import orbax.checkpoint  # noqa: F401, PLC0415, TID251 - and with it JAX
    except ModuleNotFoundError as error:
        tell({"missing": error.name})
        return
    for line in sys.stdin:
        answer(json.loads(line), tell)
        tell({"done": True})


if __name__ == "__main__":
    main()
