"""Grounds of the user's: rasters in files, resampled to the map.

A file holds a two-dimensional raster of values in [0, 1], of any size, which is stretched over the whole map. A cell
of it is of class 1 where the mean of the raster over its area exceeds 0.5. All missions fly over the same ground:
it is a constant of the program, and no part of the states.

    .npy    numbers or booleans; axis 0 is x, axis 1 is y
    .png    shades of grey, from black 0 to white 1; x is to the right and y upwards, as in pictures of missions
"""

import dataclasses
import functools
import hashlib
import io
import os
from pathlib import Path

import jax
import numpy as np

SUFFIXES = (".npy", ".png")
_MORE_THAN_HALF = 0.5 + 1e-9  # sums of shares are rounded


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Raster:
    """A ground for maps of side n. It is no array to JAX, but a constant."""

    checksum: str  # SHA-256 of the file
    side: int  # n, cells
    bits: np.ndarray = dataclasses.field(compare=False, repr=False)  # uint8[ceil(n / 8), n], as `Terrain.bits`
    count: int = dataclasses.field(compare=False)  # number of class-1 cells


def load(path: str, n: int) -> Raster:
    """Read a ground for maps of n x n cells. Raises ValueError, in one sentence: no such file, or no such raster."""
    try:
        status = os.stat(path)
        return _load(path, n, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ValueError(
            f"coverage: the terrain '{path}' cannot be read ({error.strerror}): put the file there, or name another one"
        ) from None


@functools.lru_cache(maxsize=8)
def _load(path: str, n: int, mtime_ns: int, size: int) -> Raster:
    """`load` a file of this age and size: it is read once."""
    del mtime_ns, size
    content = Path(path).read_bytes()
    try:
        values = _read_png(content) if path.lower().endswith(".png") else _read_npy(content)
        cells = resample(check(values), n) > _MORE_THAN_HALF
        if not cells.any():
            raise ValueError(
                "has no cell above 0.5, so the region of interest would be empty: raise some of its values"
            )
    except ValueError as error:
        raise ValueError(f"coverage: the terrain '{path}' {error}") from None
    padded = np.pad(cells, ((0, -n % 8), (0, 0))).reshape(-1, 8, n)
    bits = np.packbits(padded, axis=1, bitorder="little")[:, 0]
    return Raster(hashlib.sha256(content).hexdigest(), n, bits, int(cells.sum()))


def _read_npy(content: bytes) -> np.ndarray:
    try:
        values = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError, MemoryError):
        values = None
    if not isinstance(values, np.ndarray):
        raise ValueError("is not a NumPy array: write it with numpy.save")
    return values


def _read_png(content: bytes) -> np.ndarray:
    """float64[W, H], axes x and y."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise ValueError("is not a readable PNG: save the picture again") from None
    if image.mode in ("I", "I;16", "I;16B"):  # 16 bits
        grey = np.asarray(image, np.float64) / 65535
    else:
        red, green, blue, alpha = np.moveaxis(np.asarray(image.convert("RGBA")), -1, 0)
        if (alpha < 255).any():
            raise ValueError("is transparent in places: save it without transparency")
        if (red != green).any() or (green != blue).any():
            raise ValueError("has colours: save it in shades of grey, black for 0 and white for 1")
        grey = red / 255
    return grey[::-1].T


def check(values: np.ndarray) -> np.ndarray:
    """Return a raster as float64[H, W]. Raises ValueError, the end of a sentence, if it is no raster."""
    if values.ndim != 2 or not values.size:
        raise ValueError(f"has the shape {values.shape}: it must be a raster with two dimensions")
    if values.dtype.kind not in "biuf":
        raise ValueError(f"holds values of type {values.dtype}: it must hold numbers from 0 to 1")
    values = values.astype(np.float64)
    if np.isnan(values).any():
        raise ValueError("holds NaN: write 0 or 1 where nothing is known")
    if values.min() < 0 or values.max() > 1:
        raise ValueError(f"holds values from {values.min():g} to {values.max():g}: scale them to 0 to 1")
    return values


def resample(values: np.ndarray, n: int) -> np.ndarray:
    """float64[n, n]: the means of a raster float64[H, W] over the cells of a map that covers the same area."""
    for _ in range(2):  # rows, then columns
        rows = len(values)
        sums = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])
        borders = np.arange(n + 1) * rows
        whole = borders // n
        rest = (borders % n / n)[:, None]
        inside = sums[whole] + rest * values[np.minimum(whole, rows - 1)]  # integral up to the border of each cell
        values = (np.diff(inside, axis=0) * (n / rows)).T
    return values
