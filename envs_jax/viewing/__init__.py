"""Recorded episodes, the viewer interface, and a page that plays any record in a browser.

`Environment.viewer()` returns an environment's viewer. Pictures are PIL images; a page is one self-contained HTML
text. `page` provides the controls, the figures and the curves; a viewer adds its scene.
"""

from envs_jax.viewing.charts import figure, image, plot_metric, spread
from envs_jax.viewing.page import RATES, page
from envs_jax.viewing.record import GREY, INK, Level, Line, Record, Viewer, colours, label

__all__ = [
    "GREY",
    "INK",
    "RATES",
    "Level",
    "Line",
    "Record",
    "Viewer",
    "colours",
    "figure",
    "image",
    "label",
    "page",
    "plot_metric",
    "spread",
]
