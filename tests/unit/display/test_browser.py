"""Displays in headless Chromium: images are drawn where no script runs, and a time line zooms where one may."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from cute_nvfp4 import show
from cute_nvfp4.display import timelines
from cute_nvfp4.display.svg import PALETTE, stacked

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium (Debian's package)"),
    pytest.mark.timeout(120),
]
WHEEL = """<script>
const plot = document.querySelector("svg svg"), box = plot.getBoundingClientRect();
const at = {clientX: box.left + box.width / 2, clientY: box.top + 5, bubbles: true, cancelable: true};
%s
</script>"""
IN = 'for (let i = 0; i < 5; i++) plot.dispatchEvent(new WheelEvent("wheel", {...at, deltaY: -1}));'
OUT_AGAIN = IN + 'plot.dispatchEvent(new MouseEvent("dblclick", at));'


def chromium(page: Path, *options: str) -> str:
    """What Chromium writes for a page."""
    profile = page.parent / "profile"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    command = [BROWSER, *flags, "--window-size=1250,900", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout


def time_line() -> timelines.Picture:
    color = PALETTE[0]
    bars = [timelines.Bar(begin, begin + 10, f"load {begin}", color) for begin in range(0, 100, 20)]
    return timelines.drawn({"warp 0": bars, "warp 1 <&>": [timelines.Bar(50, 100, "µ", PALETTE[1])]}, "steps", "t", 0)


def zoomed(tmp_path: Path, events: str) -> tuple[list[float], list[float], str]:
    """(the view box, the axis's labels, the page) after some events."""
    page = tmp_path / "page.html"
    time_line().write(page)
    page.write_text(page.read_text() + WHEEL % events)
    text = chromium(page, "--dump-dom")
    box = re.search(r'<svg x="150"[^>]*viewBox="([^"]+)"', text)[1]
    labels = re.findall(r'data-at="[^"]+" data-per="[^"]+">([^<]+)<', text)
    return [float(x) for x in box.split()], [float(x) for x in labels], text


def test_a_time_line_zooms_about_the_pointer(tmp_path: Path) -> None:
    (left, _, width, height), labels, text = zoomed(tmp_path, IN)
    assert width == pytest.approx(1000 * 0.8**5, rel=1e-3) and height == 2 * timelines.ROW
    assert left + width / 2 == pytest.approx(500, abs=1)
    assert labels[0] == pytest.approx(left / 10, abs=0.1) and labels[-1] == pytest.approx((left + width) / 10, abs=0.1)
    assert "<img" not in text and 'data-ready="zoom"' in text
    assert "µ: 50 to 100" in unescape(text) and "warp 1 <&>" in unescape(text)


def test_a_double_click_shows_the_whole_again(tmp_path: Path) -> None:
    (left, _, width, _), labels, _ = zoomed(tmp_path, OUT_AGAIN)
    assert (left, width) == (0, 1000) and labels == [10 * k for k in range(11)]


def test_images_are_drawn_where_no_script_runs(tmp_path: Path) -> None:
    page, shot = tmp_path / "page.html", tmp_path / "page.png"
    stacked(show("(8,8):(8,1)", element_bytes=4), time_line()).write(page)
    forbids = """<meta http-equiv="Content-Security-Policy" content="script-src 'none'">"""  # as pages of GitHub do
    page.write_text(page.read_text().replace("<meta", f"{forbids}<meta", 1))
    chromium(page, f"--screenshot={shot}")
    pixels = (imread(shot)[..., :3] * 255).round().astype(int)
    for color in PALETTE[:2]:
        want = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - want).max(axis=-1) <= 1).sum() > 100, color
    assert (pixels == 255).all(axis=-1).mean() > 0.5
