"""A statistic that the kernels do not compute yet is refused by them, and computed by another backend."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhead
from polyhead.ops.common.statistics import IN_KERNELS, NAMES, kernel_reasons
from tests.ops.interpreter.interpreted import in_the_interpreter

_LAST = "    learned_sink_mass: Tensor | None = None\n"


def check_refusals(source: str) -> None:
    """Call the kernels of a copy of polyhead in which `RowStatistics` has one more field, `novelty`."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "polyhead"]:
        del sys.modules[name]
    sys.path.insert(0, source)
    from polyhead.errors import BackendUnsupported
    from polyhead.layers import GrowingCache, MultiHeadAttention, base_attention
    from polyhead.layers.variants import RoutedHeads, TalkingHeads
    from polyhead.ops.attention import AttentionOutput, Statistics
    from polyhead.ops.decode.api import cached_reasons
    from polyhead.ops.decode.fused import CacheArguments

    assert sys.modules["polyhead"].__file__ == f"{source}/polyhead/__init__.py"
    refused = "the kernels of {} do not compute novelty"
    x, options = torch.randn(2, 5, 48, dtype=torch.float16), {"backend": "fused", "dtype": torch.float16}
    for operation, layer in (
        ("attention", MultiHeadAttention(48, 3, **options)),
        ("attention", RoutedHeads(48, 3, shape="full", top_k=2, **options)),
        ("talking heads", TalkingHeads(48, 3, **options)),
    ):
        with pytest.raises(BackendUnsupported, match=refused.format(operation)):
            layer(x, statistics=("entropy", "novelty"))

    key = torch.zeros(2, 3, 19, 16)
    for statistics, reasons in (
        (Statistics("entropy", "novelty"), [refused.format("decode")]),
        (Statistics(), [refused.format("decode")]),
        (Statistics("entropy"), []),
    ):
        assert cached_reasons(key[:, :, :1], CacheArguments(key, key), 19, mask=None, statistics=statistics) == reasons

    attended = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *key_heads: object, statistics: Any, **options: Any) -> AttentionOutput:
        attended.append(statistics.names)
        return AttentionOutput(torch.zeros(*q.shape[:3], v.shape[3]))

    base_attention.attention = base_attention.uneven_attention = attend
    for key_heads in (None, (0, 0, 1)):
        layer, cache = MultiHeadAttention(48, 3, key_heads=key_heads, causal=True), GrowingCache()
        with torch.no_grad():
            for statistics in ("entropy", "novelty"):
                layer(torch.randn(2, 1, 48), cache=cache, statistics=statistics)
    assert attended == [("novelty",)] * 2  # the entropy is decoded


def test_a_statistic_that_no_kernel_computes_is_refused_by_all_of_them(tmp_path: Path) -> None:
    package = shutil.copytree(Path(polyhead.__file__).parent, tmp_path / "polyhead")
    source = package / "ops" / "common" / "statistics.py"
    text = source.read_text(encoding="utf-8")
    assert text.count(_LAST) == 1
    source.write_text(text.replace(_LAST, _LAST + "    novelty: Tensor | None = None\n"), encoding="utf-8")
    in_the_interpreter(check_refusals, str(tmp_path))


def test_every_kernel_writes_every_statistic_but_that_of_learned_sinks_in_talking_heads() -> None:
    missing = {operation: sorted(set(NAMES) - names) for operation, names in IN_KERNELS.items()}
    assert missing == {"attention": [], "decode": [], "talking heads": ["learned_sink_mass"]}


def test_a_reason_names_only_the_statistics_that_are_missing() -> None:
    names = ("entropy", "learned_sink_mass", "confidence")
    assert kernel_reasons("attention", names) == []
    assert kernel_reasons("talking heads", names) == ["the kernels of talking heads do not compute learned_sink_mass"]
