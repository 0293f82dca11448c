"""Weights as one run of bytes that is cut into buckets of a bounded size; both sides compute the same cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from limes.weights.names import Specs, as_bytes, writable_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start .. start + num` of a weight, `offset` bytes into its bucket."""

    name: str
    start: int
    num: int
    offset: int


@dataclass(slots=True)
class Bucket:
    """What travels together."""

    pieces: list[Piece] = field(default_factory=list)
    num_bytes: int = 0


def cut_buckets(specs: Specs, bucket_bytes: int) -> list[Bucket]:
    """Cut the weights, in order. All buckets but the last are full; a large weight is spread over several."""
    buckets: list[Bucket] = []
    for name, spec in specs.items():
        start = 0
        while start < spec.num_bytes:
            if not buckets or buckets[-1].num_bytes == bucket_bytes:
                buckets.append(Bucket())
            bucket = buckets[-1]
            num = min(spec.num_bytes - start, bucket_bytes - bucket.num_bytes)
            bucket.pieces.append(Piece(name, start, num, bucket.num_bytes))
            bucket.num_bytes += num
            start += num
    return buckets


def packed(
    tensors: Iterator[tuple[str, Tensor]], buckets: list[Bucket], buffer: Callable[[], Tensor]
) -> Iterator[Tensor]:
    """Fill one buffer a bucket; `tensors` is read as far as each bucket needs, and to its end with the last.

    Args:
        buffer: gives a uint8 tensor that holds the largest bucket and is free to be written.

    Yields:
        The buffer, for each bucket.
    """
    name: str | None = None
    content: Tensor | None = None
    for number, bucket in enumerate(buckets):
        target = buffer()
        for piece in bucket.pieces:
            while name != piece.name:  # weights without elements have no piece
                name, tensor = next(tensors)
                content = as_bytes(tensor)
            assert content is not None
            target[piece.offset : piece.offset + piece.num].copy_(content[piece.start : piece.start + piece.num])
        if number == len(buckets) - 1:
            for _ in tensors:  # weights without elements, and the source's own check of its end
                pass
        yield target
    if not buckets:
        for _ in tensors:
            pass


def unpack(content: Tensor, bucket: Bucket, weights: Mapping[str, Tensor]) -> None:
    """Write a bucket that has arrived into the weights, in place."""
    for piece in bucket.pieces:
        target = writable_bytes(weights[piece.name], piece.name)
        target[piece.start : piece.start + piece.num].copy_(content[piece.offset : piece.offset + piece.num])
