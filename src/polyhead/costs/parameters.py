"""The parameters of a layer by what they are for, and whether they are the 4 d_model² that everybody remembers."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.costs.cost import estimate_cost
from polyhead.costs.workload import Workload
from polyhead.layers.config import AttentionConfig, HeadsConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.variants.collaborative.config import CollaborativeConfig
from polyhead.layers.variants.routed.config import RoutedConfig


@dataclass(frozen=True, slots=True)
class Parameters:
    """Weights of the four projections, and `other`: biases, norms, gates, and what an arrangement has of its own.

    Latent heads have no keys and values of their own: `key` holds the latents and what expands them, values included.
    """

    query: int
    key: int
    value: int
    output: int
    other: int

    @property
    def total(self) -> int:
        return self.query + self.key + self.value + self.output + self.other

    @property
    def projections(self) -> int:
        return self.total - self.other

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.query + other.query,
            self.key + other.key,
            self.value + other.value,
            self.output + other.output,
            self.other + other.other,
        )

    def times(self, layers: int) -> Parameters:
        return Parameters(*(layers * x for x in (self.query, self.key, self.value, self.output, self.other)))


@dataclass(frozen=True, slots=True)
class Identity:
    """Whether Q, K, V and O of one layer together have 4 d_model² weights, and if not, why."""

    expected: int
    found: int
    reasons: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return self.expected == self.found


def count_parameters(config: AttentionConfig) -> Parameters:
    """Of one layer.

    >>> from polyhead.layers.config import MultiHeadConfig
    >>> count_parameters(MultiHeadConfig(512, 8, num_kv_heads=2))
    Parameters(query=262144, key=65536, value=65536, output=262144, other=1280)
    """
    query, key, value, output = _projections(config)
    # The tokens of another sequence have inputs of any width; how many there are counts for nothing here.
    total = estimate_cost(config, Workload.cross(1, 1)).parameters
    return Parameters(query, key, value, output, total - query - key - value - output)


def four_squares(config: AttentionConfig) -> Identity:
    """Whether it holds: every head has keys and values of its own, and all heads together are as wide as the input.

    >>> from polyhead.layers.config import MultiHeadConfig
    >>> four_squares(MultiHeadConfig(512, 8)).holds
    True
    >>> four_squares(MultiHeadConfig(512, 8, head_dim=128, num_kv_heads=4)).reasons
    ('8 heads of 128 channels are 1024 wide, d_model is 512', '8 heads share 4 key and value heads')
    """
    width: int = config.layout.embed_dim  # type: ignore[attr-defined]
    found = sum(_projections(config))
    return Identity(4 * width**2, found, () if found == 4 * width**2 else tuple(_reasons(config)))


def _projections(config: AttentionConfig) -> tuple[int, int, int, int]:
    if isinstance(config, LatentConfig):
        latent = config.layout
        width, heads, rank = latent.embed_dim, latent.num_heads, latent.q_lora_rank
        queries = heads * latent.head_dim
        query = rank * (width + queries) if rank else width * queries
        expanded = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.value_head_dim)
        return query, width * latent.cache_width + expanded, 0, heads * latent.value_head_dim * width
    layout = config.layout  # type: ignore[attr-defined]
    width, kv_heads = layout.embed_dim, layout.num_kv_heads
    heads = layout.num_heads
    if isinstance(config, RoutedConfig):
        heads = config.num_heads * (kv_heads if config.shape == "shared" else 1)
    queries, keys = heads * layout.head_dim, kv_heads * layout.head_dim
    if isinstance(config, CollaborativeConfig):
        assert config.shared_dim is not None
        queries = keys = config.shared_dim
    values = kv_heads * layout.value_dim
    output = heads * layout.value_dim * width
    return width * queries, layout.key_input_dim * keys, layout.value_input_dim * values, output


def _reasons(config: AttentionConfig) -> list[str]:
    if isinstance(config, LatentConfig):
        return [f"keys and values of all heads are made of one latent of {config.kv_lora_rank} channels a token"]
    if isinstance(config, RoutedConfig):
        return [f"{config.num_heads} heads to choose from, over {config.layout.num_kv_heads} of keys and values"]
    if isinstance(config, CollaborativeConfig):
        return [f"queries and keys of all heads share {config.shared_dim} channels"]
    assert isinstance(config, HeadsConfig)
    layout, found = config.layout, []
    for name, dim in (("", layout.head_dim), (" of values", layout.value_dim)):
        if layout.num_heads * dim != layout.embed_dim and (not name or dim != layout.head_dim):
            found.append(
                f"{layout.num_heads} heads of {dim} channels{name} are {layout.num_heads * dim} wide, "
                f"d_model is {layout.embed_dim}"
            )
    if layout.num_kv_heads != layout.num_heads:
        found.append(f"{layout.num_heads} heads share {layout.num_kv_heads} key and value heads")
    if (layout.key_input_dim, layout.value_input_dim) != (layout.embed_dim, layout.embed_dim):
        found.append(f"keys and values are read from {layout.key_input_dim} and {layout.value_input_dim} channels")
    return found
