"""`Shard`: one of several parts of a text, for workers that read it together."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.errors import OptionError


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`-th batch of a text, from batch `index` on; the text is cut into the same batches for every count.

    Shards of a text differ by at most one batch. They differ little in tokens, since neighbouring batches have contexts
    of about the same length: contexts are sorted by length within long stretches of the text.

    >>> [batch for batch in range(7) if Shard(1, 3).has(batch)]
    [1, 4]
    >>> print(Shard(1, 3))
    2/3
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise OptionError(
                f"a shard must have an index from 0 to its count - 1, got index {self.index} of count {self.count}"
            )

    def has(self, batch: int) -> bool:
        """Return whether the shard contains a batch.

        Args:
            batch: index of the batch in the text.
        """
        return batch % self.count == self.index

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"


WHOLE = Shard()  # all of a text
