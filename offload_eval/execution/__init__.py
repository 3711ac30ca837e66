"""Runs cells: model loading, the workload's tokens, one pass, worker processes and the session over all cells."""
