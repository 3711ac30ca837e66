"""Figures of the report, one module each, over the same records as its tables. Drawing imports matplotlib."""
