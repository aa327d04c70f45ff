"""`Settings` of an inspection, saved with a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from polyhead.errors import OptionError
from polyhead.files import build, short
from polyhead.observation.renamed import current_name
from polyhead.sources.texts import TOKENS

IMPORTANCE = ("auto", "none", "gradient", "ablation", "both")
IN_MEMORY = "(in memory)"  # a text that has no path
DTYPES = ("float32", "bfloat16", "float16")
# Saved by earlier versions, and ignored: permissions, and the choice of returned weights.
_EARLIER = ("allow_pickle", "trust_remote_code", "via_weights")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an inspection; a resumed run must have the same.

    `model` and `text` are names or paths, `field` is the text field of .jsonl and .parquet files. `context` is the
    maximum number of tokens per sequence, by default 512 or the model's maximum if that is smaller; `tokens` is the
    maximum number in total, `batch_tokens` per batch. `layers` and `statistics` restrict what is observed. `importance`
    is "ablation" (of every head in turn), "gradient", "both", "none", or "auto": gradients for causal and masked
    language models, none for encoder-decoders, ablation for other models.

    Permissions (`allow_pickle`, `trust_remote_code`) are not settings: settings are saved with a run, and a file must
    never grant permissions.

    Args:
        model: name or path of the model; None is the packaged one.
        text: path of the text; None is the built-in one.
        field: text field of .jsonl and .parquet files.
        context: tokens per context.
        tokens: maximum number of tokens in total.
        batch_tokens: maximum number of tokens per batch.
        layers: layers to observe; None for all.
        statistics: statistics to compute; None for all.
        importance: how importance is measured.
        importance_tokens: number of tokens on which it is measured; None is 8,192 for gradient, 2,048 for ablation and
            both, and 256 if "auto" selects ablation.
        chance: also observe a model with random weights, as the chance level.
        seed: seed of samples, random weights and repeated words.
        device: device of the model.
        dtype: dtype of the model; None is float32 on a CPU and bfloat16 elsewhere.
    """

    model: str | None = None
    text: str | None = None
    field: str = "text"
    context: int | None = None
    tokens: int = TOKENS
    batch_tokens: int = 4096
    layers: tuple[int, ...] | None = None
    statistics: tuple[str, ...] | None = None
    importance: Literal["auto", "none", "gradient", "ablation", "both"] = "auto"
    importance_tokens: int | None = None
    chance: bool = True  # also observe a model with random weights, as the chance level
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_tokens", "context", "importance_tokens"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise OptionError(f"{name} must be at least 1, got {number}")
        if not 0 <= self.seed < 1 << 60:  # probes derive other seeds from it
            raise OptionError(f"seed must be an integer of at least 0 and below 2^60, got {self.seed}")
        if self.layers is not None and not self.layers:
            raise OptionError("layers must contain at least one layer, got none; omit it for all layers")
        if self.statistics is not None:
            from polyhead.observation.statistics import StatisticsRequest  # imports PyTorch

            StatisticsRequest.of(self.statistics)  # raises for unknown names
        if self.importance not in IMPORTANCE:
            raise OptionError(f"importance must be one of {', '.join(IMPORTANCE)}; got {self.importance!r}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise OptionError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dictionary of JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """Return the settings that `to_dict` wrote; missing ones have their defaults.

        Args:
            values: the dictionary.
        """
        if not isinstance(values, dict):
            raise OptionError(f"the settings of a run must be an object, got {short(values)}")
        values = {name: x for name, x in values.items() if name not in _EARLIER}
        if isinstance(values.get("statistics"), list):
            values["statistics"] = [current_name(x) if isinstance(x, str) else x for x in values["statistics"]]
        return build(cls, values)
