"""Titles of the report's sections that figures stand in as well."""

from typing import Final

CAPACITY: Final = "Capacity"
STRATEGIES: Final = "Strategies"
MEMORY: Final = "Memory: analytic, traced, and of the run"
TRANSFERS: Final = "Transfers"
SPREAD: Final = "Spread"
