"""TransformerLens' `TransformerBridge`: run the transformers attention modules that its attention bridges replace.

A bridge computes attention by itself, with all weights in memory, so that hooks on scores and patterns fire. While a
model is observed, its attention runs in the original modules, which call transformers' attention interface; hooks on
everything else fire as before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from polyhead.errors import OptionError


@contextmanager
def original_attention(model: nn.Module) -> Iterator[None]:
    """Run, in place of attention bridges, the attention modules of transformers that they wrap.

    Args:
        model: a model; one without bridges is left as it is.
    """
    module = sys.modules.get("transformer_lens.model_bridge.generalized_components.attention")
    if module is None:  # then the model contains no bridge
        yield
        return
    with ExitStack() as undo:
        for name, part in model.named_modules():
            if isinstance(part, module.AttentionBridge) and part.original_component is not None:
                undo.callback(_restore, part, part.__dict__.get("forward"))
                part.__dict__["forward"] = _Original(name, part)
        yield


def wrapped_models(model: nn.Module) -> list[nn.Module]:
    """Return the models that bridges in `model` run without having them as submodules.

    Args:
        model: a model.
    """
    wrapped = [module.__dict__.get("original_model") for module in model.modules()]
    return [x for x in wrapped if isinstance(x, nn.Module)]


def _restore(part: nn.Module, forward: Any) -> None:
    if forward is None:
        part.__dict__.pop("forward", None)
    else:
        part.__dict__["forward"] = forward


@dataclass(frozen=True, slots=True, eq=False)
class _Original:
    name: str
    bridge: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooked = [
            name
            for name, point in self.bridge.named_modules()
            if hasattr(point, "fwd_hooks") and (len(point.fwd_hooks) or len(point.bwd_hooks))
        ]
        if len(hooked):
            raise OptionError(
                "while a TransformerBridge is observed, its attention runs in transformers' own modules, where hooks "
                f"of the bridge do not fire, got hooks on {', '.join(hooked[:3])} of {self.name!r}; use gates and "
                "collectors, or remove the hooks"
            )
        return self.bridge.original_component(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or copied bridge gets its own method back.
        return getattr, (self.bridge, "forward")
