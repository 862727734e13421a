"""The report's page in a real Chromium: no errors, no requests, by keyboard, in both schemes, with hostile names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.storage import LocalStorage
from safepoint.manager.report import collect, render

from support.browser import CHROMIUM, Browser
from support.report_root import make_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
ARROW_LEFT, HOME, TAB = 37, 36, 9

CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => color.slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgba(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest("svg, script, style, .skip")) continue;
    const [a, b] = [light(rgba(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${element.tagName} ${element.className} ${ratio.toFixed(2)}`);
  }
  return [...new Set(poor)];
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    make_root(folder / "gpt", 12, process_count=2, item=HOSTILE)
    page = folder / "report.html"
    page.write_text(render(collect(LocalStorage(folder / "gpt"))))
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_an_error_or_a_request_and_runs_nothing_of_the_root(
    browser: Browser, page: Path, scheme: str
) -> None:
    browser.open(page, scheme=scheme)

    assert browser.problems == []
    assert [address for address in browser.requests if address != page.as_uri()] == []
    assert browser.look("document.title") == "Checkpoints of gpt"
    assert browser.look("document.images.length + document.querySelectorAll('script').length") == 2
    assert HOSTILE in browser.look("document.getElementById('sizes').innerText")
    background = browser.look("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 23, 26)") == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(browser: Browser, page: Path, scheme: str) -> None:
    browser.open(page, scheme=scheme)
    browser.look("document.querySelectorAll('details').forEach((one) => one.open = true)")

    assert browser.look(CONTRAST) == []


def test_it_is_used_by_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page)
    reached = []
    for _ in range(40):
        browser.press("Tab", code=TAB)
        reached.append(browser.look("document.activeElement.id || document.activeElement.className || ''"))
        if reached[-1] == "find":
            break
    assert reached[0] == "skip"
    assert "pick" in reached
    assert reached[-1] == "find"

    browser.look("document.getElementById('pick').focus()")
    browser.press("Home", code=HOME)
    first = browser.look("document.getElementById('picked').textContent")
    assert first.startswith("step 1000 · 6.64 s in all · ")
    assert browser.look("document.getElementById('pick').getAttribute('aria-valuetext')") == first
    assert browser.look("document.querySelectorAll('#chart-secs g.on').length") == 1

    browser.look("document.getElementById('find').focus()")
    for letter in "best":
        browser.press(letter, code=ord(letter.upper()), text=letter)
    rows = "[...document.querySelectorAll('#steps tbody tr')]"
    shown = browser.look(f"{rows}.filter((row) => row.checkVisibility()).map((row) => row.innerText)")
    assert 0 < len(shown) <= 2
    assert all("best 2 by loss" in text for text in shown)
    assert browser.look("document.getElementById('found').textContent") == f"{len(shown)} of 15"
    assert browser.problems == []


def test_a_screen_reader_is_told_of_everything(browser: Browser, page: Path) -> None:
    browser.open(page)
    told = browser.accessible()
    roles: dict[str, list[str]] = {}
    for role, name in told:
        roles.setdefault(role, []).append(name)

    assert all(roles["image"]), "an image without a name"
    assert any("How long each of 15 saves took" in name for name in roles["image"])
    assert any("Treemap of the" in name for name in roles["image"])
    assert roles["main"]
    assert roles["navigation"] == ["Sections"]
    assert roles["heading"][0] == "Checkpoints of gpt"
    assert {"How long saves took", "Steps, and why each stays", "Faults seen"} <= set(roles["region"])
    assert all(roles["table"])
    assert "Steps, the newest commit first" in roles["table"]
    assert roles["slider"] == ["Save"]
    assert roles["searchbox"] == ["Show rows with"]
    assert any("No space left on device" in name for role, name in told if role in ("cell", "StaticText"))


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_window_scrolls_down_and_never_aside(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)

    assert browser.look("document.documentElement.scrollWidth") <= width


def test_everything_is_there_without_a_script(browser: Browser, page: Path) -> None:
    browser.open(page, scripts=False)
    names = [name for _, name in browser.accessible()]

    assert "Steps, the newest commit first" in names
    assert "Show rows with" not in names  # what needs one is not shown


def test_a_thousand_steps_open_and_can_be_walked_through(browser: Browser, tmp_path: Path) -> None:
    make_root(tmp_path / "run", 2, process_count=1, state={"w": torch.zeros(64)})
    facts: Any = collect(LocalStorage(tmp_path / "run"))
    facts.saves = facts.kept[-1:] * 1000
    page = tmp_path / "report.html"
    page.write_text(render(facts))
    browser.open(page)

    assert browser.problems == []
    assert browser.look("document.querySelectorAll('#chart-secs g').length") == 1000
    browser.look("document.getElementById('pick').focus()")
    for _ in range(3):
        browser.press("ArrowLeft", code=ARROW_LEFT)
    assert browser.look("document.getElementById('pick').value") == "996"
    assert json.loads(browser.look("document.getElementById('save-texts').textContent"))[996].startswith("step 2000")
