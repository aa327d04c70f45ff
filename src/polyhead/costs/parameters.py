"""Parameters of a layer by projection, and the check against the textbook count of 4 d_model²."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.costs.descriptions import describe
from polyhead.costs.work import Amounts
from polyhead.layers.config import AttentionConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.variants.collaborative.layer import CollaborativeConfig
from polyhead.layers.variants.routed.config import RoutedConfig


@dataclass(frozen=True, slots=True)
class Parameters(Amounts):
    """Weights of the four projections, and `other`: biases, norms, gates, and parameters of the variant.

    For latent attention (MLA) `key` contains the down-projection and the up-projections of keys and values, and
    `value` is 0.
    """

    query: int
    key: int
    value: int
    output: int
    other: int

    @property
    def projections(self) -> int:
        return self.total - self.other


@dataclass(frozen=True, slots=True)
class ParameterIdentity:
    """Comparison of the Q, K, V and O weights of one layer with 4 d_model², with reasons for a difference."""

    expected: int
    found: int
    reasons: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return self.expected == self.found


def count_parameters(config: AttentionConfig) -> Parameters:
    """Count the parameters of one layer.

    >>> from polyhead.layers import MultiHeadConfig
    >>> count_parameters(MultiHeadConfig(512, 8, num_kv_heads=2))
    Parameters(query=262144, key=65536, value=65536, output=262144, other=1280)
    """
    layer = describe(config)
    return Parameters(*layer.projections, layer.other_parameters)


def four_squares(config: AttentionConfig) -> ParameterIdentity:
    """Compare the Q, K, V and O weights with 4 d_model².

    Equality needs as many KV heads as heads, and num_heads * head_dim equal to d_model.

    >>> from polyhead.layers import MultiHeadConfig
    >>> four_squares(MultiHeadConfig(512, 8)).holds
    True
    >>> four_squares(MultiHeadConfig(512, 8, head_dim=128, num_kv_heads=4)).reasons
    ('8 heads x 128 channels are 1024 wide, d_model is 512', '8 heads share 4 KV heads')
    """
    width: int = config.layout.embed_dim  # type: ignore[attr-defined]
    weights = sum(describe(config).projections)
    return ParameterIdentity(4 * width**2, weights, () if weights == 4 * width**2 else tuple(_reasons(config)))


def _reasons(config: AttentionConfig) -> list[str]:
    if isinstance(config, LatentConfig):
        return [f"keys and values of all heads are expanded from one latent of {config.kv_lora_rank} channels"]
    if isinstance(config, RoutedConfig):
        return [f"{config.num_heads} routed heads share {config.layout.num_kv_heads} KV heads"]
    if isinstance(config, CollaborativeConfig):
        return [f"queries and keys of all heads share {config.shared_dim} channels"]
    assert isinstance(config, HeadsConfig)
    layout, reasons = config.layout, []
    for name, dim in (("", layout.head_dim), ("value ", layout.value_dim)):
        if layout.num_heads * dim != layout.embed_dim and (not name or dim != layout.head_dim):
            reasons.append(
                f"{layout.num_heads} heads x {dim} {name}channels are {layout.num_heads * dim} wide, "
                f"d_model is {layout.embed_dim}"
            )
    if layout.num_kv_heads != layout.num_heads:
        reasons.append(f"{layout.num_heads} heads share {layout.num_kv_heads} KV heads")
    if (layout.key_input_dim, layout.value_input_dim) != (layout.embed_dim, layout.embed_dim):
        reasons.append(f"key and value inputs have {layout.key_input_dim} and {layout.value_input_dim} channels")
    return reasons
