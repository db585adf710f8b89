"""The former place of `jaxrl.api`, for programs that import it from here."""

import sys

from jaxrl import api

sys.modules[__name__] = api
