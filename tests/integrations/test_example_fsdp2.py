"""docs/examples/fsdp2.py: killed and gone on with, by as many processes and by another number."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

from support.source_tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import PoolView

EXAMPLE = ROOT / "docs" / "examples" / "fsdp2.py"


def test_the_example_goes_on_bit_for_bit_and_with_another_number_of_processes(
    pool2: PoolView, process_pool: PoolView, tmp_path: Path
) -> None:
    (whole, again), (others_whole, others_again) = pool2.run(case_trains, str(tmp_path))

    assert list(again) == [6, 7, 8, 9]
    assert again == {step: whole[step] for step in again}
    assert others_again == {step: others_whole[step] for step in others_again}
    assert process_pool.run(case_goes_on, str(tmp_path), num_processes=1) == [[10, 11]]


def case_trains(rank: int, root: str) -> tuple[dict[int, float], dict[int, float]]:
    del rank
    train = runpy.run_path(str(EXAMPLE))["train"]
    whole = train(f"{root}/whole", num_steps=10)
    train(f"{root}/run", num_steps=6)
    return whole, train(f"{root}/run", num_steps=10)


def case_goes_on(rank: int, root: str) -> list[int]:
    del rank
    return list(runpy.run_path(str(EXAMPLE))["train"](f"{root}/run", num_steps=12))
