"""Frozen data types: what was asked for, how, what was seen, what was kept and how it was judged."""
