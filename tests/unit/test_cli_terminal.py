"""What is different on a terminal: bars, questions, and the shell's completion."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import LocalStorage
from safepoint.manager.cli.progress import shown_progress
from safepoint.manager.verifying import verify_steps

from support.command import save_steps

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = [sys.executable, "-c", "from safepoint.manager.cli.app import app; app(prog_name='safepoint')"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_steps(tmp_path / "run", 10, 20)
    return tmp_path / "run"


def test_long_work_shows_a_bar_on_a_terminal_and_nothing_elsewhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown: list[str] = []
    for stream, quiet in ((Terminal(), False), (Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with shown_progress(quiet=quiet) as progress:
            verify_steps(LocalStorage(root), progress=progress)
        shown.append(stream.getvalue())

    assert "verify" in shown[0]
    assert "kB" in shown[0]
    assert shown[1:] == ["", ""]


def talk(arguments: list[str], answer: str) -> tuple[int, str]:
    """Run the command on a terminal of its own and answer its question; return its exit status and what it said."""
    leader, follower = pty.openpty()
    process = subprocess.Popen([*COMMAND, *arguments], stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    os.write(leader, f"{answer}\n".encode())
    said = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(leader)
    return process.wait(timeout=60), said.decode()


@pytest.mark.slow
def test_rm_asks_on_a_terminal_and_does_as_it_is_told(root: Path) -> None:
    code, said = talk(["rm", str(root / "10")], "n")
    assert (code, (root / "10").exists()) == (130, True)
    assert "Delete step 10" in said
    assert "Traceback" not in said

    code, said = talk(["rm", str(root / "10")], "y")
    assert (code, (root / "10").exists()) == (0, False)
    assert "step 10 deleted" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cat {root} mod", {"model.weight", "model.bias", "model.tied"}),
        ("cons", {"consolidate"}),
        ("ls {root} --keep-b", {"--keep-best"}),
    ],
)
def test_the_shell_completes_commands_options_and_leaves(
    words: str, expected: set[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "safepoint " + words.format(root=root)
    monkeypatch.setenv("COMP_WORDS", text)
    monkeypatch.setenv("COMP_CWORD", str(len(text.split()) - 1))
    monkeypatch.setenv("_SAFEPOINT_COMPLETE", "complete_bash")

    ended = subprocess.run(COMMAND, capture_output=True, text=True, timeout=100, check=False)

    assert set(ended.stdout.split()) == expected, ended.stderr


def test_an_output_that_takes_no_more_ends_the_command_with_a_status_and_no_stack(root: Path) -> None:
    main = [sys.executable, "-c", "from safepoint.manager.cli import main; main()"]
    reader, pipe = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    started = [
        subprocess.Popen([*main, "show", root], stdout=pipe, stderr=subprocess.PIPE, text=True),
        subprocess.Popen([*main, "ls", root, "--json"], stdout=full, stderr=subprocess.PIPE, text=True),
        subprocess.Popen(
            [*main, "ls", root], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ascii_only
        ),
    ]
    os.close(pipe)
    os.close(full)
    said = [process.communicate(timeout=100) for process in started]

    assert [process.returncode for process in started] == [128 + signal.SIGPIPE, 4, 0]
    assert said[0][1] == ""
    assert "cannot write the output: No space left on device" in json.loads(said[1][1])["error"]["message"]
    assert "consolidated \\xd71" in said[2][0]
    assert said[2][1] == ""
