"""Runs on tensors without data: the real modeling code, the real caches, the real generate()."""
