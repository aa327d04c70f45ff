"""`LayerDescription`: base class of the cost descriptions of attention layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from polyhead.costs.recording.recorder import Recorder
from polyhead.costs.recording.tape import Block
from polyhead.errors import DtypeError, OptionError
from polyhead.layers.config import AttentionConfig

Config = TypeVar("Config", bound=AttentionConfig)


class LayerDescription(ABC, Generic[Config]):
    """Cost description of one type of layer: its parameters, its cache, and the operations of one call.

    `record` is the only description of a call. It calls the recorder's methods in the order in which the layer runs
    the operations; FLOPs, bytes moved, launches and the memory of every tensor are derived from what they record.

    Args:
        config: config of the layer that is described.
    """

    cache_scales: int | None = None  # float32 scales per token of an int8 cache; None: int8 is not supported

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    @abstractmethod
    def projections(self) -> tuple[int, int, int, int]:
        """Number of weights in the query, key, value and output projections, without biases."""

    @property
    @abstractmethod
    def other_parameters(self) -> int:
        """Number of all other parameters: biases, norms, gates, positions, and those of the variant."""

    @property
    @abstractmethod
    def cache_elements(self) -> int:
        """Number of elements that a token adds to the cache."""

    @abstractmethod
    def record(self, call: Recorder) -> Block:
        """Record one forward pass and return its output.

        Args:
            call: recorder of the call.

        Returns:
            The block of the output.
        """

    @property
    def num_parameters(self) -> int:
        return sum(self.projections) + self.other_parameters

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token of one sequence in the layer's cache.

        Args:
            dtype: dtype of the cache.
        """
        if dtype is torch.int8:
            if self.cache_scales is None:
                raise OptionError(
                    "latent attention has no int8 cache, got cache_dtype torch.int8; a QuantizedCache would store the "
                    "latents twice, as keys and as values"
                )
            return self.cache_elements + self.cache_scales * torch.float32.itemsize
        if not dtype.is_floating_point:
            raise DtypeError(f"cache_dtype must be a floating-point dtype or torch.int8 (with scales), got {dtype}")
        return self.cache_elements * dtype.itemsize
