"""Paged KV cache with copy-on-write sharing of pages (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from polyhead.errors import CacheError
from polyhead.layers.kv_cache.base import CacheView, KVCache
from polyhead.layers.kv_cache.tokens import CacheSizes, TokenLayout, count, integers, longest, new_tokens, positive
from polyhead.masks import Mask
from polyhead.ops.decode.fused import CacheArguments

Tables = list[list[int]]

# Attributes of a cache that refer to its pool, which copies and pickles do not share.
_POOL_ATTRIBUTES = ("_allocated", "_tables", "_on_host", "_on_device", "_finalizer")


class PagePool:
    """Reference-counted pages of `page_size` tokens.

    `keys` is [num_pages, page_size, kv_heads, head_dim] and `values` [num_pages, page_size, kv_heads, value_dim]: a
    token's heads are contiguous, as paged kernels read them. A page used by several sequences is never written to.

    Args:
        num_pages: number of pages.
        page_size: tokens per page.
        layout: sizes, dtype and device of a token.
    """

    def __init__(self, num_pages: int, page_size: int, layout: TokenLayout) -> None:
        self.page_size = positive("page_size", page_size)
        self.layout = layout
        pages = count("num_pages", num_pages)
        with torch.inference_mode(False):  # a pool built in inference mode can be written to afterwards
            self.keys, self.values = (
                torch.zeros(pages, self.page_size, layout.num_kv_heads, dim, dtype=layout.dtype, device=layout.device)
                for dim in (layout.head_dim, layout.value_dim)
            )
        self._uses = [0] * pages
        self._free = list(reversed(range(pages)))

    @property
    def num_pages(self) -> int:
        return len(self._uses)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def uses(self, page: int) -> int:
        """Return the number of sequences that use a page.

        Args:
            page: index of the page.
        """
        return self._uses[page]

    def require(self, num_pages: int) -> None:
        """Raise, before anything is changed, unless `num_pages` pages are free.

        Args:
            num_pages: number of pages.
        """
        if num_pages > self.num_free:
            raise CacheError(
                f"this append needs {num_pages} more pages of {self.page_size} tokens, got a pool of {self.num_pages} "
                f"with {self.num_free} free: {num_pages - self.num_free} missing; reset or crop caches that share the "
                "pool, or build it with more pages"
            )

    def take(self) -> int:
        """Return a free page, which is in use from then on."""
        page = self._free.pop()
        self._uses[page] = 1
        return page

    def hold(self, pages: Sequence[int]) -> None:
        """Add one use of each page.

        Args:
            pages: pages in use.
        """
        for page in pages:
            self._uses[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Release one use of each page; a page without uses is free.

        Args:
            pages: pages in use.
        """
        for page in pages:
            self._uses[page] -= 1
            if self._uses[page] == 0:
                self._free.append(page)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the contents of pages.

        Args:
            sources: pages to read.
            targets: pages to write, one for each source.
        """
        if sources:
            source, target = integers([*sources, *targets], self.layout.device).chunk(2)
            self.keys.index_copy_(0, target, self.keys.index_select(0, source))
            self.values.index_copy_(0, target, self.values.index_select(0, source))


class PagedCache(KVCache):
    """Cache whose sequences are lists of pages in a `PagePool`.

    A fork, a reordered beam or a branch of a prefix shares pages; a write copies only the last page, if partly filled.
    Pages are freed by `reset`, by `crop`, and when neither a cache nor its views are referenced any more. The decode
    kernels read `block_tables` and `pool`. `key` and `value` of a view, which the PyTorch backends need, gather the
    pages into a copy of the whole cache.

    Args:
        num_pages: pages of the pool.
        page_size: tokens per page.
        sizes: batch_size, num_kv_heads, head_dim, value_dim, dtype and device, as of `KVCache`.

    >>> prompt = PagedCache(num_pages=7, page_size=4)
    >>> view = prompt.append(torch.ones(1, 2, 6, 3), torch.ones(1, 2, 6, 3))
    >>> answers = prompt.branch(3)
    >>> answers.lengths, prompt.pool.num_free
    ((6, 6, 6), 5)
    """

    def __init__(self, *, num_pages: int, page_size: int = 16, **sizes: Unpack[CacheSizes]) -> None:
        self._num_pages, self._page_size = count("num_pages", num_pages), positive("page_size", page_size)
        super().__init__(**sizes)
        self._build(None if self._layout is None else PagePool(num_pages, page_size, self._layout))

    @classmethod
    def on_pool(cls, pool: PagePool, *, batch_size: int) -> Self:
        """Build an empty cache on a pool that other caches may share.

        Args:
            pool: pages.
            batch_size: number of sequences.

        Returns:
            The cache.
        """
        return cls._on_pool(pool, batch_size=batch_size, **pool.layout.sizes())

    @classmethod
    def _on_pool(cls, pool: PagePool, **sizes: Unpack[CacheSizes]) -> Self:
        cache = cls.__new__(cls)
        cache._num_pages, cache._page_size = pool.num_pages, pool.page_size
        KVCache.__init__(cache, **sizes)
        cache._build(pool)
        return cache

    def _build(self, pool: PagePool | None) -> None:
        """Set the pool, and empty tables; without a pool, the first block determines one."""
        self._allocated = pool
        self._tables: Tables = [[] for _ in range(self.batch_size)]
        self._on_host: Tensor | None = None  # the tables as tensors, valid until they change
        self._on_device: Tensor | None = None
        self._finalizer = None
        if pool is not None:
            # The finaliser references the pool and the tables, not the cache, which it would keep alive.
            self._finalizer = weakref.finalize(self, _free_all, pool, self._tables)
            self._finalizer.atexit = False

    @property
    def pool(self) -> PagePool:
        self._require_layout()
        assert self._allocated is not None
        return self._allocated

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def block_tables(self) -> Tensor:
        """Pages of each sequence in order, int32 [batch, max pages]; read-only, cached until a table changes.

        Entries past a sequence's last page are 0, a valid page, so that a kernel may load a whole row.
        """
        if self._on_device is None:
            self._on_device = self._host_tables().to(self.pool.layout.device, non_blocking=True)
        return self._on_device

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct pages used by this cache; `pool.nbytes` is the allocated total."""
        pages = len({page for table in self._tables for page in table})
        return pages * (self.pool.nbytes // self._num_pages) if pages else 0

    def fork(self) -> Self:
        if self._layout is None:
            return type(self)(
                num_pages=self._num_pages, page_size=self._page_size, batch_size=self._built_batch, **self._sizes
            )
        return self._share(self._tables, self._lengths, self._max_length, self._built_batch)

    def branch(self, batch_size: int, *, row: int = 0, length: int | None = None) -> Self:
        """Return a cache of `batch_size` sequences that share the first `length` tokens of sequence `row`.

        Args:
            batch_size: sequences of the new cache.
            row: sequence of this cache.
            length: tokens to share; all by default.
        """
        count("batch_size", batch_size)
        self._require_layout()
        if not 0 <= row < self.batch_size:
            raise CacheError(f"row must be the index of a sequence, 0 to {self.batch_size - 1}, got {row}")
        length = self._lengths[row] if length is None else length
        if not 0 <= length <= self._lengths[row]:
            raise CacheError(f"a branch can take 0 to {self._lengths[row]} tokens of sequence {row}, got {length}")
        prefix = self._tables[row][: self._pages_for(length)]
        return self._share([prefix] * batch_size, (length,) * batch_size, length, batch_size)

    def reset(self) -> None:
        if self._layout is not None:
            _free_all(self.pool, self._tables)
        super().reset()
        if self._layout is None:
            if self._finalizer is not None:
                self._finalizer.detach()  # it would keep the memory of the pool
            self._build(None)
        else:
            self._tables[:] = [[] for _ in range(self.batch_size)]
            self._tables_changed()

    # A copy or a pickle gets its own pool with only this cache's pages: the pool's counts include other caches.

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _POOL_ATTRIBUTES}
        if self._layout is None:
            return state
        pages = sorted({page for table in self._tables for page in table})
        place = {page: i for i, page in enumerate(pages)}
        where = integers(pages, self._layout.device)
        tables = [[place[page] for page in table] for table in self._tables]
        pages_of_keys, pages_of_values = (x.index_select(0, where) for x in (self.pool.keys, self.pool.values))
        return {**state, "contents": (pages_of_keys, pages_of_values, tables)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        contents = state.pop("contents", None)
        self.__dict__.update(state)
        if self._layout is None:
            self._build(None)
            return
        keys, values, tables = contents
        pool = PagePool(self._num_pages, self._page_size, self._layout)
        pool.keys[: len(keys)] = keys
        pool.values[: len(values)] = values
        self._build(pool)
        uses = Counter(page for table in tables for page in table)
        for expected in range(len(keys)):
            page = pool.take()
            assert page == expected  # a fresh pool allocates its pages in order
            pool.hold([page] * (uses[page] - 1))
        self._tables[:] = tables
        self._tables_changed()

    # ---- implementation of KVCache

    def _needs_rows_on_host(self) -> bool:
        return True

    def _start(self, layout: TokenLayout, batch_size: int) -> None:
        super()._start(layout, batch_size)
        self._build(PagePool(self._num_pages, self._page_size, layout))

    def _append(self, key: Tensor, value: Tensor, new_lengths: tuple[int, ...], layout: TokenLayout) -> CacheView:
        num_tokens = key.shape[2]
        starts = self._lengths
        shared = self._shared_last_pages(starts, new_lengths)
        fresh = [
            self._pages_for(start + new) - len(table)
            for start, new, table in zip(starts, new_lengths, self._tables, strict=True)
        ]
        pool = self.pool
        pool.require(len(shared) + sum(fresh))

        sources, targets = [], []
        for row in shared:
            sources.append(self._tables[row][-1])
            targets.append(pool.take())
            self._tables[row][-1] = targets[-1]
        pool.copy_pages(sources, targets)
        pool.give_back(sources)
        for table, missing in zip(self._tables, fresh, strict=True):
            table.extend(pool.take() for _ in range(missing))
        if shared or any(fresh):
            self._tables_changed()

        self._write(key, value, new_lengths)
        self._advance(new_lengths, num_tokens)
        return self._view(self._stored(), self._lengths_mask(new_lengths, num_tokens), new_lengths)

    def _write(self, key: Tensor, value: Tensor, new_lengths: tuple[int, ...]) -> None:
        row, in_block, position = new_tokens(self._lengths, new_lengths, key.shape[2])
        page = self._host_tables()[row, position // self.page_size].long()
        slot = page * self.page_size + position % self.page_size
        row, in_block, slot = torch.stack([row, in_block, slot]).to(key.device, non_blocking=True)
        for pages, block in ((self.pool.keys, key), (self.pool.values, value)):
            pages.flatten(0, 1).index_copy_(0, slot, block[row, :, in_block])  # [tokens, kv_heads, dim]

    def _stored(self) -> tuple[Tensor, ...]:
        return self.pool.keys, self.pool.values, self.block_tables

    def _describe(self, stored: tuple[Tensor, ...]) -> CacheArguments:
        keys, values, tables = stored
        return CacheArguments(keys, values, block_table=tables)

    def _read(self, stored: tuple[Tensor, ...], num_keys: int) -> tuple[Tensor, Tensor]:
        keys, values, tables = stored
        batch, max_pages = tables.shape

        def gather(pages: Tensor) -> Tensor:
            rows = pages.index_select(0, tables.flatten())  # [batch * pages, page_size, kv_heads, dim]
            tokens = max_pages * self.page_size if batch else num_keys
            return rows.view(batch, tokens, *pages.shape[2:]).narrow(1, 0, num_keys).transpose(1, 2)

        return gather(keys), gather(values)

    def _view(
        self, stored: tuple[Tensor, ...], mask: Mask | None, new_lengths: tuple[int, ...] | None = None
    ) -> CacheView:
        return CacheView(self, stored, self._max_length, mask, self._lengths, new_lengths)

    def _reorder(self, rows: Sequence[int] | None, where: Tensor) -> None:
        assert rows is not None  # guaranteed by `_needs_rows_on_host`
        new = [list(self._tables[row]) for row in rows]
        for table in new:
            self.pool.hold(table)
        _free_all(self.pool, self._tables)
        self._tables[:] = new
        self._tables_changed()

    def _crop(self, new_lengths: tuple[int, ...]) -> None:
        for table, length in zip(self._tables, new_lengths, strict=True):
            pages = self._pages_for(length)
            dropped = table[pages:]
            del table[pages:]
            self.pool.give_back(dropped)
            if dropped:
                self._tables_changed()

    # ---- pages

    def _tables_changed(self) -> None:
        self._on_host = None
        self._on_device = None

    def _host_tables(self) -> Tensor:
        if self._on_host is None:
            max_pages = longest([len(table) for table in self._tables], otherwise=0)
            rows = [table + [0] * (max_pages - len(table)) for table in self._tables]
            self._on_host = torch.tensor(rows, dtype=torch.int32, device="cpu").view(len(rows), max_pages)
        return self._on_host

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _share(self, tables: Tables, lengths: tuple[int, ...], width: int, built_batch: int | None) -> Self:
        forked = type(self)._on_pool(self.pool, batch_size=built_batch, **self._sizes)
        forked._layout = self._layout  # also if a reset is to leave the layout to the next block
        forked._tables[:] = [list(table) for table in tables]
        forked._tables_changed()
        for table in forked._tables:
            self.pool.hold(table)
        forked._lengths = lengths
        forked._max_length = width
        forked.holds_masked_keys = self.holds_masked_keys
        return forked

    def _shared_last_pages(self, starts: tuple[int, ...], new_lengths: tuple[int, ...]) -> list[int]:
        """Return the rows that must copy their last page before writing to it.

        These are all rows that write to the page, except one if no other sequence uses it.
        """
        copied: Counter[int] = Counter()
        rows = []
        for row, (start, new) in enumerate(zip(starts, new_lengths, strict=True)):
            if new and start % self.page_size:
                page = self._tables[row][-1]
                if self.pool.uses(page) - copied[page] > 1:
                    copied[page] += 1
                    rows.append(row)
        return rows


def _free_all(pool: PagePool, tables: Tables) -> None:
    for table in tables:
        pool.give_back(table)
    tables.clear()
