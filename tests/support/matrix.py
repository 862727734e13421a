"""Who reads what: the cases that tests run, and the table of them in docs/formats.md.

A test that stands here takes its cases from here, by `cases`; so the table cannot say more than what runs. As a script
(`python tests/support/matrix.py`): put the table into the document.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

__all__ = ["DOCUMENT", "ROWS", "Row", "cases", "rendered"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "formats.md"
BEGIN, END = "<!-- made by tests/support/matrix.py: begin -->\n", "<!-- end -->\n"
BOTH = ("consolidated", "sharded")
ORBAX_READERS = (
    "Orbax: `StandardCheckpointer`, `PyTreeCheckpointer`, v1 `load`, as numpy; onto 8 JAX devices, sharded otherwise"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One writer and one reader.

    Attributes:
        writer: a format of ours, or in words what others wrote.
        where: what the processes or devices are, where they are not processes of torch.distributed.
        mode: of the save; "" where there is none.
        counts: numbers of processes that save; () where a test does not tell.
        reader: in words.
        test: which proves it.
    """

    writer: str
    where: str = ""
    mode: str = ""
    counts: tuple[int, ...] = ()
    reader: str
    test: str


def _ours(test: str, reader: str, *shown: tuple[str, tuple[str, ...], tuple[int, ...]], where: str = "") -> list[Row]:
    return [
        Row(writer=writer, mode=mode, counts=counts, reader=reader, test=test, where=where)
        for writer, modes, counts in shown
        for mode in modes
    ]


def _theirs(test: str, *shown: tuple[str, str], reader: str = "`restore_foreign`") -> list[Row]:
    return [Row(writer=writer, where=where, reader=reader, test=test) for writer, where in shown]


ROWS: list[Row] = [
    *_ours(
        "tests/multiprocess/test_save_restore.py::test_any_number_of_processes_restores_what_any_other_saved",
        "safepoint, on 1, 2, 3 and 4 processes; `safe_open`",
        ("safetensors", BOTH, (1, 2, 3, 4)),
    ),
    *_ours(
        "tests/multiprocess/test_formats.py::test_what_some_processes_saved_any_other_number_restores",
        "safepoint, on 1 and 3 processes",
        ("torch", ("consolidated",), (1, 2, 4)),
        ("orbax", BOTH, (1, 2, 4)),
        ("orbax_zstd", BOTH, (2,)),
    ),
    *_ours(
        "tests/multiprocess/test_formats.py::test_torch_loads_what_some_processes_held_in_parts",
        "`torch.load(weights_only=True)`",
        ("torch", ("consolidated",), (1, 4)),
    ),
    *_ours(
        "tests/integrations/test_orbax_reads_ours.py::test_every_reader_of_orbax_restores_what_some_processes_saved",
        ORBAX_READERS,
        ("orbax", BOTH, (1, 2, 4)),
        ("orbax_zstd", ("consolidated",), (1,)),
        ("orbax_zstd", ("sharded",), (2, 4)),
    ),
    *_ours(
        "tests/integrations/test_orbax_reads_ours.py::test_the_manager_of_orbax_opens_our_root",
        "Orbax: `CheckpointManager`",
        ("orbax", ("sharded",), (2,)),
        ("orbax_zstd", ("sharded",), (2,)),
    ),
    *_ours(
        "tests/xla/test_orbax_xla.py::test_orbax_restores_what_a_mesh_of_torch_xla_saved",
        f"{ORBAX_READERS}; `CheckpointManager`",
        ("orbax", BOTH, (1,)),
        ("orbax_zstd", ("sharded",), (1,)),
        where="an SPMD mesh of 8 devices of torch_xla",
    ),
    *_theirs(
        "tests/integrations/test_convert.py::test_dcp_loads_what_was_exported",
        ('`convert(format="dcp")`', ""),
        reader="`torch.distributed.checkpoint.load`",
    ),
    *_theirs(
        "tests/integrations/test_convert.py::test_hugging_face_files_hold_each_weight_once",
        ('`convert(format="huggingface")`', ""),
        reader="`safetensors.torch.load_file`",
    ),
    *_theirs(
        "tests/integrations/test_convert.py::test_dcp_loads_it_onto_shards",
        ('`convert(format="dcp")`', ""),
        reader="`torch.distributed.checkpoint.load`, onto the shards of 2 processes",
    ),
    *_theirs(
        "tests/integrations/test_huggingface_models.py::test_transformers_loads_what_was_converted",
        ('`convert(format="huggingface")`, tied weights and not', ""),
        reader="`transformers`: `from_pretrained`; `safe_open`",
    ),
    *_theirs(
        "tests/integrations/test_convert.py::test_orbax_reads_an_item_of_many_arrays_that_was_converted",
        ('`convert(format="orbax")`, `"orbax_zstd"`', ""),
        reader="Orbax: `StandardCheckpointer`",
    ),
    *_theirs(
        "tests/integrations/test_foreign_orbax.py::test_every_layout_of_orbax_is_read_bit_for_bit",
        ("Orbax 0.12: OCDBT and files, zarr 2 and 3, one item and several, v0 and v1", "a mesh of 8 JAX devices"),
    ),
    *_theirs(
        "tests/integrations/test_foreign_orbax.py::test_each_process_reads_what_its_shards_hold",
        ("Orbax 0.12: OCDBT, files", "a mesh of 8 JAX devices"),
        reader="`restore_foreign`, on 2 processes, each its shards",
    ),
    *_theirs(
        "tests/xla/test_orbax_xla.py::test_a_mesh_of_torch_xla_restores_what_orbax_saved",
        ("Orbax 0.12: OCDBT", "2 processes of JAX"),
        reader="`restore_foreign`, onto an SPMD mesh of 8 devices of torch_xla",
    ),
    *_theirs(
        "tests/integrations/test_foreign_torch.py::test_what_dcp_saved_on_some_processes_is_restored_on_others",
        ("torch.distributed.checkpoint", "2 and 4 processes"),
        reader="`restore_foreign`, on 1, 3 and 4 processes",
    ),
    *_theirs(
        "tests/compat/test_foreign_golden.py::test_each_is_read_and_becomes_a_step_of_ours",
        ("`torch.save`, Lightning, safetensors, Hugging Face, torch.distributed.checkpoint", ""),
        ("torch_xla: `xm.save`, FSDP on 2 ranks, its experimental manager", "one device, 2 ranks, a mesh of 8 devices"),
        reader="`restore_foreign`, `convert`",
    ),
    *_theirs(
        "tests/xla/test_foreign_xla.py::test_what_torch_xla_wrote_is_restored_onto_another_mesh",
        ("torch_xla: `xm.save`, FSDP on 2 ranks, its experimental manager", "a mesh of 8 devices"),
        reader="`restore_foreign`, onto another SPMD mesh of 8 devices",
    ),
    *_theirs(
        "tests/integrations/test_huggingface_models.py::test_what_transformers_saved_fills_a_model_and_becomes_a_step",
        ("`transformers`: `save_pretrained`, one file and several", ""),
        reader="`restore_foreign`, `convert`",
    ),
    *_theirs(
        "tests/integrations/test_conversions.py::test_any_kind_becomes_any_other_bit_for_bit",
        ("any of these", ""),
        reader="`convert`, into any of our formats, `dcp` and `huggingface`",
    ),
]


def cases(test: str) -> list[tuple[str, str, int]]:
    """Return format, mode and number of processes of each case that a test has to run."""
    found = [(row.writer, row.mode, count) for row in ROWS if row.test == test for count in row.counts]
    assert found, f"{test} is not in the table"
    return found


def rendered() -> str:
    """Return the table."""
    lines = ["| written by | mode | by | read by | test |", "|---|---|---|---|---|"]
    lines += [
        _line(list(rows)) for _, rows in groupby(ROWS, key=lambda row: (row.writer, row.where, row.counts, row.test))
    ]
    return "\n".join(lines) + "\n"


def _line(rows: list[Row]) -> str:
    row = rows[0]
    writer = f"`{row.writer}`" if row.mode else row.writer
    counts = " and ".join(", ".join(map(str, row.counts)).rsplit(", ", 1))
    by = row.where or (f"{counts} process{'es' if row.counts != (1,) else ''}" if row.counts else "\N{EN DASH}")
    modes = ", ".join(one.mode for one in rows) if row.mode else "\N{EN DASH}"
    path, _, name = row.test.partition("::")
    return f"| {writer} | {modes} | {by} | {row.reader} | [{name}](../{path}) |"


def with_table(text: str) -> str:
    """Return the document with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{DOCUMENT} has no place for the table"
    return f"{before}{BEGIN}{rendered()}{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
