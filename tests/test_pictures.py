"""scripts.pictures: the pictures of the documentation are those that the program draws."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts import pictures

ROOT = Path(__file__).parents[1]


def encode(*frames: np.ndarray, kind: str = "PNG") -> bytes:
    images = [Image.fromarray(frame) for frame in frames]
    images[0].save(buffer := io.BytesIO(), kind, save_all=len(images) > 1, append_images=images[1:])
    return buffer.getvalue()


def make_frame(seed: int = 0) -> np.ndarray:
    """A picture of 320 x 640 pixels with fields of colour."""
    fields = np.random.default_rng(seed).integers(0, 256, (10, 20, 3), np.uint8)
    return fields.repeat(32, axis=0).repeat(32, axis=1)


def test_every_picture_of_the_documentation_is_drawn() -> None:
    drawn = {file for _, _, files in pictures.PICTURES.values() for file in files} | {*pictures.LEARNING}
    docs = ROOT / "docs"
    assert drawn == {path.name for path in docs.rglob("*") if path.suffix in (".png", ".gif", ".jpg", ".svg")}
    assert "scripts.pictures --check" in (ROOT / "Makefile").read_text()


def test_differences_are_told_but_those_of_machines() -> None:
    frame = make_frame()
    noise = np.random.default_rng(1).integers(-9, 10, frame.shape)
    other = frame.copy()
    other[64:96, 64:96] = 255 - other[64:96, 64:96]
    assert pictures.compare(encode(frame), encode(np.clip(frame + noise, 0, 255).astype(np.uint8))) == ""
    assert pictures.compare(encode(frame), encode(other)) == "0.5% of it differs"
    assert pictures.compare(encode(frame), encode(frame[:-1])) == "(640, 320) pixels instead of (640, 319)"
    one = encode(frame, make_frame(2), kind="GIF")
    assert pictures.compare(one, one) == ""
    longer = encode(frame, make_frame(2), frame, kind="GIF")
    assert pictures.compare(one, longer) == "2 frames instead of 3"
    last = encode(frame, make_frame(3), kind="GIF")
    assert pictures.compare(one, last).endswith("% of it differs"), "only the first frame was compared"


def test_stale_pictures_are_named_or_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = encode(make_frame()), encode(make_frame(5))
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    monkeypatch.setattr(pictures, "speed_up_start", lambda: None)
    monkeypatch.setattr(pictures, "draw_pictures", lambda: iter([("a.png", new), ("b.png", old), ("c.png", old)]))
    (tmp_path / "a.png").write_bytes(old)
    (tmp_path / "b.png").write_bytes(old)
    assert pictures.main(["--check"]) == 1
    told = capsys.readouterr().err
    assert "docs/a.png (" in told and "docs/c.png (missing)" in told and "b.png" not in told
    assert not (tmp_path / "c.png").exists() and (tmp_path / "a.png").read_bytes() == old
    assert pictures.main([]) == 0
    assert (tmp_path / "a.png").read_bytes() == new and (tmp_path / "c.png").read_bytes() == old
    assert pictures.main(["--check"]) == 0
