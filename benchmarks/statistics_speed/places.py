"""Shapes at which the speed of statistics is measured, and the statistics requested at each."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = ("forward", "backward", "profile", "materialised", "memory", "layer", "decode", "cpu")
# Requested in addition to the log-sum-exp.
ROW_STATISTICS = ("max_logit", "entropy", "mean_distance")
DECODE_STATISTICS = ("max_logit", "entropy")
LONG = 4096  # tokens from which on the bounds hold


@dataclass(frozen=True)
class Shape:
    """One place of the benchmark, written batch x heads x tokens x head_dim, or heads/kv_heads where they differ.

    >>> Shape.parse("1x32/8x32768x128")
    Shape(batch=1, heads=32, kv_heads=8, tokens=32768, head_dim=128)
    """

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        batch, heads, *rest = [*text.split("x"), ""]
        heads, slash, kv_heads = heads.partition("/")
        sizes = [batch, heads, kv_heads if slash else heads, *rest[:-1]]
        if len(sizes) != 5 or not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(f"a shape is BATCHxHEADSxTOKENSxDIM or BATCHxHEADS/KV_HEADSxTOKENSxDIM, got {text!r}")
        if int(sizes[1]) % int(sizes[2]):
            raise ValueError(f"heads must be a multiple of kv_heads, got {text!r}")
        return cls(*map(int, sizes))

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.batch}x{heads}x{self.tokens}x{self.head_dim}"

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.tokens


_ATTENTION = (
    "16x12x512x64",
    "4x16x4096x64",
    "4x16x4096x128",
    "1x16x16384x128",
    "1x32x32768x128",
    "1x32/8x32768x128",
)
# Materialised weights end between 16,384 and 32,768 tokens; the last shows that.
_MATERIALISED = ("4x16x4096x64", "4x16x4096x128", "1x16x16384x128", "1x32x32768x128")
_SHAPES: dict[str, tuple[str, ...]] = {
    "forward": _ATTENTION,
    "backward": _ATTENTION,
    "profile": _ATTENTION,
    "materialised": _MATERIALISED,
    "memory": ("1x32x131072x128",),
    "layer": ("8x16x2048x64", "2x16x8192x128"),
    "decode": ("1x32/8x32768x128", "16x32/8x8192x128", "64x32/8x4096x128", "16x32/1x32768x128"),
    "cpu": ("1x8x4096x64",),
    "cpu layer": ("2x12x1024x64", "1x8x4096x64"),
}
_QUICK: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("forward", "backward", "profile"), ("4x16x4096x64", "4x16x4096x128", "1x16x16384x128")),
    "materialised": ("4x16x4096x128",),
    "layer": ("8x16x2048x64",),
}


def shapes_of(part: str, *, quick: bool) -> list[Shape]:
    """Default shapes of a part; a quick run leaves out the slowest."""
    return [Shape.parse(text) for text in (_QUICK if quick and part in _QUICK else _SHAPES)[part]]
