"""Pictures, animations and pages of episodes show names of runs, policies and metrics as they are."""

import html
import json
import re
from types import SimpleNamespace
from typing import Any

import matplotlib.text
import numpy as np
import pytest
from helpers.tiny import Corridor

from envs_jax import viewing
from envs_jax.viewing import drawing, pictures

NAMES = ("$\\frac{1$", "_hidden", "50% <b>&amp;</script><script>", "back\\slash @SCENE@ [red]")


class Words(viewing.Viewer):
    """A panel with a word, and a legend of it."""

    def drawing(self, record: viewing.Record) -> viewing.Drawing:
        shape = drawing.text("word", (1, 1), record.title)
        styles = {"word": viewing.Style("#000000", size=1.0), "line": viewing.Style(stroke="#000000", width=1.0)}
        panel = viewing.Panel(record.title, (0, 0, 2, 2), [shape], [()] * (record.steps + 1))
        return viewing.Drawing([panel], styles, [viewing.LegendEntry(record.title, "line")])


def record_of(name: str) -> viewing.Record:
    steps: Any = SimpleNamespace(reward=np.zeros((3, 1)))
    # the interval of the first mean is not known: all episodes were equal
    means = {"return": np.array([[0.0, np.nan], [0.5, 0.1], [0.75, 0.1]])}
    curves = {"return": np.array([0.0, 0.0, 1.0])}
    return viewing.Record(Corridor(), name, f"policy {name}", name, (), steps, np.zeros((2, 1)), curves, {name: means})


@pytest.mark.parametrize("name", NAMES)
def test_pictures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def look(figure: Any) -> Any:
        texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
        assert not any(text.get_parse_math() for text in texts if "$" in text.get_text())
        shown.append([text.get_text() for text in texts])
        return image(figure)

    image = pictures.image
    monkeypatch.setattr(pictures, "image", look)
    Words().frames(record_of(name))
    Words().picture(record_of(name))
    assert len(shown) == 4
    for words in shown:  # title, panel, word of the panel, legend; policy; curves
        assert words.count(name) >= 4 and f"policy {name}" in words
        assert {f"{name} (mean)", f"this episode ({name})"} <= set(words)


@pytest.mark.parametrize("name", NAMES)
def test_pages(name: str) -> None:
    page = Words().html(record_of(name))
    assert f"<title>{html.escape(name)}</title>" in page
    data = json.loads(re.search(r"^const data = (.*);$", page, re.MULTILINE)[1])
    words = [shape[3] for shape in data["charts"]["return"] if shape[0] == "text"]
    assert {f"{name} (mean)", f"this episode ({name})"} <= set(words) and page.count("</script>") == 1
    (band,) = [shape for shape in data["charts"]["return"] if shape[0] == "area"]
    (area,) = np.reshape(band[2], (1, -1, 2))
    assert area[0].tolist() == area[-1].tolist()  # where the interval is not known the band has no width
    assert area[1].tolist() != area[-2].tolist()
