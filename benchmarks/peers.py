"""The other checkpointers, each behind the same few calls, used the way its documentation shows.

A peer takes a flat state of host tensors. What it leaves durable when `save` returns is said beside it: only files
that were synced, in a directory that was synced, outlive a power cut.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Dcp", "Orbax", "Peer", "Safetensors", "TensorStore", "TorchSave", "available", "sync_tree"]

State = dict[str, torch.Tensor]


class Peer(ABC):
    """One other checkpointer."""

    name: str
    needs: str = "torch"
    """The module that must be installed."""
    keeps: str
    """What is durable when `save` returns."""

    @abstractmethod
    def save(self, state: State, path: Path) -> None:
        """Write a state; `path` does not exist."""

    @abstractmethod
    def load_into(self, path: Path, state: State) -> None:
        """Fill the tensors of `state`."""

    def load(self, path: Path) -> State:
        """Return new tensors."""
        raise NotImplementedError

    def load_part(self, path: Path, state: State) -> None:
        """Fill the tensors of `state`, which are some of those that were saved, reading no more than need be."""
        self.load_into(path, state)

    def save_behind(self, state: State, path: Path) -> Any:
        """Begin a save and return an object whose `result()` waits for its end."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of threads."""


def available(peers: list[type[Peer]]) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that are installed, and why the others are not here."""
    found: list[Peer] = []
    absent: dict[str, str] = {}
    for kind in peers:
        if importlib.util.find_spec(kind.needs) is None:
            absent[kind.name] = f"{kind.needs} is not installed"
            continue
        try:
            found.append(kind())
        except ImportError as error:  # it is made for another torch
            absent[kind.name] = f"{kind.needs} does not run here: {error}"
    return found, absent


def sync_tree(path: Path) -> None:
    """Sync a file, or all files and directories of a tree, and the directory that holds it."""
    inside = [path, *path.rglob("*")] if path.is_dir() else [path]
    for entry in [*reversed(inside), path.parent]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _copy_into(state: State, loaded: State) -> None:
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(loaded[name])


class TorchSave(Peer):
    """torch.save and torch.load."""

    name = "torch.save"
    keeps = "nothing is synced"

    @override
    def save(self, state: State, path: Path) -> None:
        torch.save(state, path)

    @override
    def load_into(self, path: Path, state: State) -> None:
        _copy_into(state, self.load(path))

    @override
    def load(self, path: Path) -> State:
        loaded: State = torch.load(path, weights_only=True)
        return loaded


class Safetensors(Peer):
    """safetensors.torch."""

    name = "safetensors"
    needs = "safetensors"
    keeps = "nothing is synced"

    @override
    def save(self, state: State, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(state, path)

    @override
    def load_into(self, path: Path, state: State) -> None:
        _copy_into(state, self.load(path))

    @override
    def load(self, path: Path) -> State:
        from safetensors.torch import load_file

        loaded: State = load_file(path)
        return loaded

    @override
    def load_part(self, path: Path, state: State) -> None:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            _copy_into(state, {name: file.get_tensor(name) for name in state})


def _dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")


class Dcp(Peer):
    """torch.distributed.checkpoint with two writer threads."""

    name = "DCP"
    keeps = "files are synced, directories are not"

    @override
    def save(self, state: State, path: Path) -> None:
        dcp = _dcp()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=2))

    @override
    def load_into(self, path: Path, state: State) -> None:
        dcp = _dcp()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, storage_reader=dcp.FileSystemReader(path))

    @override
    def save_behind(self, state: State, path: Path) -> Any:
        dcp = _dcp()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=2))


class Orbax(Peer):
    """Orbax's StandardCheckpointer, with numpy arrays that share the tensors' memory."""

    name = "Orbax"
    needs = "orbax"
    keeps = "nothing is synced"

    def __init__(self) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import logging

        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)
        self._checkpointer = ocp.StandardCheckpointer()

    @override
    def save(self, state: State, path: Path) -> None:
        self.save_behind(state, path).result()

    @override
    def save_behind(self, state: State, path: Path) -> Any:
        self._checkpointer.save(path.absolute(), _numpy_tree(state))
        return self

    def result(self) -> None:
        """Wait for the save in flight."""
        self._checkpointer.wait_until_finished()

    @override
    def load_into(self, path: Path, state: State) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = self._checkpointer.restore(path.absolute(), _numpy_tree(state))
        _copy_into(state, {name: torch.from_numpy(array) for name, array in loaded.items()})

    @override
    def close(self) -> None:
        self._checkpointer.close()


def _numpy_tree(state: State) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in state.items()}


class TensorStore(Peer):
    """TensorStore, one zarr3 array a tensor, uncompressed."""

    name = "TensorStore"
    needs = "tensorstore"
    keeps = "files and directories are synced, one by one"

    @override
    def save(self, state: State, path: Path) -> None:
        import tensorstore as ts

        context = ts.Context()
        opened = [
            ts.open(
                {
                    "driver": "zarr3",
                    "kvstore": {"driver": "file", "path": f"{path.absolute()}/{name}/"},
                    "metadata": {
                        "shape": list(tensor.shape),
                        "data_type": "float32",
                        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(tensor.shape)}},
                        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
                    },
                },
                context=context,
                create=True,
            )
            for name, tensor in state.items()
        ]
        writes = [
            store.result().write(tensor.numpy(), can_reference_source_data_indefinitely=True)
            for store, tensor in zip(opened, state.values(), strict=True)
        ]
        for write in writes:
            write.result()

    @override
    def load_into(self, path: Path, state: State) -> None:
        import tensorstore as ts

        context = ts.Context()
        opened = [
            ts.open(
                {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path.absolute()}/{name}/"}},
                context=context,
                open=True,
            )
            for name in state
        ]
        reads = [
            ts.array(tensor.numpy(), copy=False).write(store.result())
            for store, tensor in zip(opened, state.values(), strict=True)
        ]
        for read in reads:
            read.result()
