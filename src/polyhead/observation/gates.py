"""`Session.gates`: factors for the outputs of heads, by the path and the kind of their site."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence

from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.rows import Tokens
from polyhead.observation.statistics import AttentionSite

KINDS = ("self", "cross")


class Gates(UserDict[tuple[str, str], Tensor]):
    """Gates by (path, kind); a key that no attention module can have is refused, since its gate would never be used.

    Args:
        paths: returns the names of the model's sites, or the paths of all its modules until they are known.
        are_known: returns whether they are; until then, any number of a call is accepted, as in `attn#2`.

    `create` returns the gate for a call of an observed site that has none, given its tokens.
    """

    def __init__(self, paths: Callable[[], Sequence[str]], are_known: Callable[[], bool]) -> None:
        super().__init__()
        self._paths, self._are_known = paths, are_known
        self.create: Callable[[AttentionSite, Tokens | Tensor | None], Tensor] | None = None

    def __setitem__(self, key: tuple[str, str], gate: Tensor) -> None:
        if not (isinstance(key, tuple) and len(key) == 2 and key[1] in KINDS):
            raise OptionError(f"a gate is set by path and kind (self or cross), got {key!r}")
        paths = self._paths()
        path = key[0] if self._are_known() else key[0].partition("#")[0]
        if path not in paths:
            shown = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
            raise OptionError(f"a gate needs the path of an attention module, got {key[0]!r}; the model has {shown}")
        super().__setitem__(key, gate)
