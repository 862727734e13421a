"""Kernels of flax and stacked layers as torch's weights, in any parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint
from safepoint.formats.region import Region
from safepoint.manager import Rename
from safepoint.manager.errors import InvalidArgumentError, StructureMismatchError
from safepoint.manager.foreign import restore_foreign
from safepoint.manager.foreign_names import flat_names
from safepoint.manager.foreign_views import View, unstack

if TYPE_CHECKING:
    from pathlib import Path


class Held(ForeignArray):
    """An array in memory that remembers how much of it was read."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.dtype = str(data.dtype).removeprefix("torch.")
        self.shape = tuple(data.shape)
        self.num_read = 0

    def read_into(self, region: Region, out: memoryview) -> None:
        part = self.data[region.slices_in(Region.whole(self.shape))].contiguous()
        self.num_read += part.numel()
        out[:] = part.reshape(-1).view(torch.uint8).numpy().data


def read(view: View, region: Region) -> torch.Tensor:
    data = torch.zeros(region.shape, dtype=torch.float32)
    view.read(region, data.view(-1).view(torch.uint8).numpy().data)
    return data


KERNELS = {
    "a matrix": ((6, 8), (8, 6), lambda kernel: kernel.T),
    "of heads": ((6, 2, 4), (8, 6), lambda kernel: kernel.reshape(6, 8).T),
    "from heads": ((2, 3, 8), (8, 6), lambda kernel: kernel.reshape(6, 8).T),
    "a bias of heads": ((2, 4), (8,), lambda bias: bias.reshape(8)),
    "a vector": ((8,), (8,), lambda vector: vector),
}


@given(data=st.data(), kind=st.sampled_from(sorted(KERNELS)))
def test_any_part_of_a_kernel_is_that_of_the_weight(data: st.DataObject, kind: str) -> None:
    shape, wanted, as_weight = KERNELS[kind]
    kernel = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    held = Held(kernel)
    view = View(held, is_kernel=True, wanted=wanted)
    assert view.shape == wanted
    bounds = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in wanted]
    region = Region(tuple(start for start, _ in bounds), tuple(end - start for start, end in bounds))
    assert torch.equal(read(view, region), as_weight(kernel)[region.slices_in(Region.whole(wanted))])


def test_only_the_heads_that_a_part_touches_are_read() -> None:
    held = Held(torch.arange(6.0 * 4 * 8).reshape(6, 4, 8))
    view = View(held, is_kernel=True, wanted=(32, 6))
    assert torch.equal(read(view, Region((8, 0), (8, 6))), held.data[:, 1].T)
    assert held.num_read == 6 * 8


def test_what_does_not_fit_keeps_its_shape_for_the_error_to_name() -> None:
    assert View(Held(torch.zeros(2, 3, 4)), is_kernel=True, wanted=(5, 5)).shape == (2, 3, 4)
    assert View(Held(torch.zeros(2, 3, 4)), is_kernel=True, wanted=(8, 3)).shape == (2, 3, 4)
    assert View(Held(torch.zeros(2, 3, 4)), is_kernel=True, wanted=None).shape == (2, 3, 4)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_layers_are_taken_apart_along_any_dimension(axis: int) -> None:
    data = torch.arange(24.0).reshape(2, 3, 4)
    checkpoint = ForeignCheckpoint(kind="orbax", location="/x", tree={}, arrays={("w",): Held(data)})
    from safepoint.formats.base import LeafRef  # noqa: PLC0415

    names = {"top.layers.mlp.w": LeafRef(("w",)), "top.norm": 1.0, "top.layers.count": 5}
    apart, found = unstack(checkpoint, names, {"top.layers": axis})
    assert [name for name in found if name.endswith(".w")] == [
        f"top.layers.{index}.mlp.w" for index in range(data.shape[axis])
    ]
    assert (found["top.norm"], found["top.layers.count"]) == (1.0, 5)
    for index in range(data.shape[axis]):
        layer = apart.arrays[found[f"top.layers.{index}.mlp.w"].path]
        assert torch.equal(
            read(View(layer, is_kernel=False, wanted=None), Region.whole(layer.shape)), data.select(axis, index)
        )


def decoder(num_layers: int) -> torch.nn.Module:
    """Return a model as torch has it: layers in a list, weights as [out, in]."""

    def layer() -> torch.nn.Module:
        return torch.nn.ModuleDict({"query": torch.nn.Linear(6, 8), "out": torch.nn.Linear(8, 6, bias=False)})

    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layer() for _ in range(num_layers))})


def scanned(model: torch.nn.Module) -> dict[str, Any]:
    """Return the same weights as a scanned model of flax has them, with two heads of four."""
    layers = model["layers"]  # type: ignore[index]
    query = torch.stack([layer["query"].weight.T.reshape(6, 2, 4) for layer in layers], dim=1)
    bias = torch.stack([layer["query"].bias.reshape(2, 4) for layer in layers], dim=0)
    out = torch.stack([layer["out"].weight.T.reshape(2, 4, 6) for layer in layers], dim=1)
    return {
        "params": {"decoder": {"layers": {"query": {"kernel": query}, "out": {"kernel": out}}}, "bias": {"b": bias}}
    }


NAMES = Rename(
    {
        "params.decoder.layers.*.query.kernel": "model.layers.*.query.weight",
        "params.decoder.layers.*.out.kernel": "model.layers.*.out.weight",
        "params.bias.*.b": "model.layers.*.query.bias",
    }
)
STACKED = {"params.decoder.layers": 1, "params.bias": 0}
KERNEL_NAMES = ["model.*.weight"]


def test_a_scanned_model_fills_a_list_of_layers_by_one_table(tmp_path: Path) -> None:
    saved, target = decoder(3), decoder(3)
    torch.save(scanned(saved), tmp_path / "flax.pt")
    names = [*KERNEL_NAMES, "model.*.bias"]
    with pytest.raises(StructureMismatchError):  # biases are stored as (2, 4), and not named
        restore_foreign(
            tmp_path / "flax.pt", {"model": target}, adapt=[NAMES], transposed=KERNEL_NAMES, stacked=STACKED
        )
    restore_foreign(tmp_path / "flax.pt", {"model": target}, adapt=[NAMES], transposed=names, stacked=STACKED)
    for name, value in saved.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name


def test_another_number_of_layers_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    torch.save(scanned(decoder(2)), tmp_path / "flax.pt")
    target = decoder(3)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(StructureMismatchError) as caught:
        restore_foreign(tmp_path / "flax.pt", {"model": target}, adapt=[NAMES], transposed=["model.*"], stacked=STACKED)
    assert [text for text in caught.value.mismatches or () if "layers.2.out.weight" in text]
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


@pytest.mark.parametrize(
    ("stacked", "match"), [({"params.x": 0}, "no arrays below params.x"), ({"params": 9}, "dimension 9")]
)
def test_stacks_that_are_not_there_are_named(tmp_path: Path, stacked: dict[str, int], match: str) -> None:
    torch.save(scanned(decoder(2)), tmp_path / "flax.pt")
    with pytest.raises(InvalidArgumentError, match=match):
        restore_foreign(tmp_path / "flax.pt", {"model": decoder(2)}, stacked=stacked)
    assert flat_names({"a": {"b": 1}}) == {"a.b": 1}
