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
        paths: returns the paths of the model's attention modules, or of all its modules until they are known.

    `create` returns the gate for a call of an observed site that has none, given its tokens.
    """

    def __init__(self, paths: Callable[[], Sequence[str]]) -> None:
        super().__init__()
        self._paths = paths
        self.create: Callable[[AttentionSite, Tokens | Tensor | None], Tensor] | None = None

    def __setitem__(self, key: tuple[str, str], gate: Tensor) -> None:
        if not (isinstance(key, tuple) and len(key) == 2 and key[1] in KINDS):
            raise OptionError(f"a gate is set by path and kind (self or cross), got {key!r}")
        paths = self._paths()
        if key[0] not in paths:
            shown = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
            raise OptionError(f"a gate needs the path of an attention module, got {key[0]!r}; the model has {shown}")
        super().__setitem__(key, gate)
