"""Pure arithmetic: KV footprint, budget, admission, traffic. No framework is imported."""
