"""What an inspection is asked for, and how it says how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from polyhead.errors import OptionError
from polyhead.files import build, short
from polyhead.observation.renamed import current_name
from polyhead.observation.statistics import Wanted

CONTEXT = 512  # tokens, or fewer where the model was made for fewer
TOKENS = 65_536
IMPORTANCE = ("auto", "none", "gradient", "ablation")
DTYPES = ("float32", "bfloat16", "float16")
_PERMISSIONS = ("allow_pickle", "trust_remote_code")  # saved by earlier versions, and never obeyed


@dataclass(frozen=True, slots=True)
class Settings:
    """What to look at and how long; a run that goes on must have the same.

    `context` is how many tokens are read together, at most 512 unless said otherwise. `tokens` is how many are read in
    all. `importance` is "ablation" (every head taken out in turn), "gradient", "none", or "auto": gradients where the
    model predicts tokens, ablation of a short text where it does not.

    Permissions (`allow_pickle`, `trust_remote_code`) are not settings: settings are saved with a run, and a file never
    permits anything.
    """

    model: str | None = None
    text: str | None = None
    field: str = "text"
    context: int | None = None
    tokens: int = TOKENS
    batch_tokens: int = 4096
    layers: tuple[int, ...] | None = None
    statistics: tuple[str, ...] | None = None
    importance: Literal["auto", "none", "gradient", "ablation"] = "auto"
    chance: bool = True  # whether a model with random weights is watched beside it
    via_weights: bool = False  # whether the weights are read that the model itself returns; slow, and O(n²) in memory
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_tokens", "context"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise OptionError(f"{name} must be at least 1, got {number}")
        if not 0 <= self.seed < 1 << 63:
            raise OptionError(f"seed must be an integer from 0 on, below 2^63, got {self.seed}")
        if self.layers is not None and not self.layers:
            raise OptionError("layers must be one at least, got none; leave them out for all")
        Wanted.of(self.statistics)  # known names
        if self.importance not in IMPORTANCE:
            raise OptionError(f"importance is one of {', '.join(IMPORTANCE)}; got {self.importance!r}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise OptionError(f"dtype is one of {', '.join(DTYPES)}; got {self.dtype!r}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Settings:
        if not isinstance(found, dict):
            raise OptionError(f"the settings of a run are an object, got {short(found)}")
        found = {name: x for name, x in found.items() if name not in _PERMISSIONS}
        if isinstance(found.get("statistics"), list):
            found["statistics"] = [current_name(x) if isinstance(x, str) else x for x in found["statistics"]]
        return build(cls, found)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a step of an inspection is; `total` is None where nobody knows."""

    step: str
    done: int
    total: int | None
    unit: str = "tokens"


Report = Callable[[Progress], None]
