"""The penalty of answers near the length limit."""


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to `max_length - buffer` tokens, then falling linearly to -1 at `max_length`.

    Args:
        length: tokens of the answer.
        max_length: tokens at which the penalty is -1.
        buffer: tokens over which it falls.

    Raises:
        ValueError: `buffer` is not in 1..max_length, or `length` is negative.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer = {buffer} must be between 1 and max_length = {max_length}")
    if length < 0:
        raise ValueError(f"length = {length} must not be negative")
    excess = min(max(length - (max_length - buffer), 0), buffer)
    return 0.0 - excess / buffer
