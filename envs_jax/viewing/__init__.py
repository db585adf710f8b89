"""Looking at recorded episodes: the record, what a viewer offers, and a page that plays any record in a browser.

An environment offers a viewer by `Environment.viewer()`. Pictures are PIL images; a page is one HTML text that needs
nothing else, no network either. `page` brings the controls, the figures and the curves; a viewer adds its scene.
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
