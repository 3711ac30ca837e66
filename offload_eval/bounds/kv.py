"""The familiar arithmetic, as a function that refuses what it does not mean."""


def require_int(name: str, value: object, minimum: int) -> int:
    """Returns `value` if it is an int of at least `minimum`.

    Raises:
        ValueError: It is a bool, not an int, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}; allowed: an int of at least {minimum}")
    if value < minimum:
        raise ValueError(f"{name} is {value}; allowed: an int of at least {minimum}")
    return value


def kv_bytes(tokens: int, layers: int, kv_heads: int, head_dim: int, bytes_per_value: int = 2) -> int:
    """Bytes of keys and values of `tokens` cached tokens under full attention.

    Counts keys and values of every layer. Does not count paging, padding, quantizer scales or scratch.

    Args:
        tokens: Cached tokens, over all sessions.
        layers: Layers that cache.
        kv_heads: Key-value heads a layer; not the query heads.
        head_dim: Values in one key, and in one value.
        bytes_per_value: 2 for bfloat16 and float16.

    Returns:
        2 * tokens * layers * kv_heads * head_dim * bytes_per_value.

    Raises:
        ValueError: An argument is not a positive int.
    """
    arguments = {
        "tokens": tokens,
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "bytes_per_value": bytes_per_value,
    }
    product = 2
    for name, value in arguments.items():
        product *= require_int(name, value, minimum=1)
    return product
