"""The models of a coverage run: what each is called and how it is built."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.inputs import inputs_of, parsed, with_placeholders
from benchmarks.coverage.shrinking import shrunk, table

SPREAD = 1.3  # standard deviation of a unit's sum: logits of a few units, so that no head is close to uniform


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a model, with the same random numbers each time; functions among the arguments make them anew."""

    model: nn.Module
    arguments: dict[str, Any]

    def __call__(self) -> Any:
        with torch.no_grad():
            return self.model(**self.made())

    def made(self) -> dict[str, Any]:
        """Return the arguments of one call."""
        torch.manual_seed(1)
        with torch.no_grad():
            return {name: x() if callable(x) else x for name, x in self.arguments.items()}

    def in_float64(self) -> Call:
        """Return the same call of a copy of the model in float64."""
        arguments = {
            name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in self.arguments.items()
        }
        model = copy.deepcopy(self.model).double()
        for module in model.modules():  # grouped products of experts take no float64, a loop over the experts does
            config: Any = getattr(module, "config", None)
            if getattr(config, "_experts_implementation", None) == "grouped_mm":
                config._experts_implementation = "eager"
        return Call(model, arguments)


class CannotBuildError(Exception):
    """A model that this benchmark could not build or run."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of the table: the library it is from, its name, and how to build it and its call."""

    library: str
    name: str
    build: Callable[[], tuple[nn.Module, Call]]


def transformers_subjects() -> Iterator[Subject]:
    """Yield every model type of transformers that is not a part of another one of its family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    kinds = {name: CONFIG_MAPPING[name] for name in CONFIG_MAPPING_NAMES}
    parts = {
        part for kind in kinds.values() for part in kind.sub_configs.values() if part.__module__ == kind.__module__
    }
    for name, kind in kinds.items():
        if kind not in parts:
            yield Subject("transformers", name, partial(_built, name, kind))


def _built(name: str, kind: type) -> tuple[nn.Module, Call]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    entry = table().get("transformers", {}).get(name, {})
    if "like" in entry:
        name, kind = entry["like"], CONFIG_MAPPING[entry["like"]]
    config = shrunk(kind, {**entry.get("config", {}), **entry.get("own", {})})
    if "part" in entry:
        config = getattr(config, entry["part"])
    model = strengthened(_class_of(kind, name, entry)(config))
    first = last = ""  # of the most complete arguments, and of all
    for arguments in inputs_of(model, entry.get("inputs", {})):
        for _ in range(4):
            try:
                Call(model, arguments)()
            except Exception as error:  # noqa: BLE001 - the next arguments may do
                last = f"{type(error).__name__}: {error}"
                changed = with_placeholders(arguments, model, str(error))
                if changed is None:
                    first = first or last
                    break
                arguments = changed
            else:
                return model, Call(model, arguments)
    raise CannotBuildError(f"cannot be run: {first or last}")


def _class_of(kind: type, name: str, entry: dict[str, Any]) -> Callable[[Any], nn.Module]:
    import transformers
    from transformers.models.auto import modeling_auto

    if "model" in entry:
        return (
            getattr(transformers, entry["model"], None) or _of_module(kind, lambda x: x.__name__ == entry["model"])[0]
        )
    mappings = [modeling_auto.MODEL_MAPPING_NAMES] + [
        value
        for key, value in vars(modeling_auto).items()
        if key.endswith("MAPPING_NAMES") and key.startswith("MODEL_FOR")
    ]
    for mapping in mappings:
        if name in mapping:
            found = mapping[name]
            return getattr(transformers, found if isinstance(found, str) else found[0])
    models = _of_module(kind, lambda x: x.config_class is kind and not x.__name__.endswith("PreTrainedModel"))
    if not models:
        raise CannotBuildError(f"no model class takes {kind.__name__}")
    return models[0]


def _of_module(kind: type, accept: Callable[[Any], bool]) -> list[Any]:
    from transformers import PreTrainedModel

    module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
    found = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, PreTrainedModel) and accept(x)]
    return sorted(found, key=lambda x: (not x.__name__.endswith("Model"), x.__name__))


def strengthened(model: nn.Module) -> nn.Module:
    """Return a model in evaluation mode with random weights so large that its heads differ."""
    torch.manual_seed(0)
    # Batch norms do not normalise in evaluation mode, so that activations would grow from layer to layer.
    spread = 0.9 if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) else SPREAD
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.ndim > 1 and parameter.numel():
            fan_in = parameter[0].numel()
            nn.init.normal_(parameter, 0, spread / fan_in**0.5)
    return model.float().eval()


def of_tensors(library: str, name: str, build: Callable[[], nn.Module], **inputs: str) -> Subject:
    """Return a subject whose inputs are written as in the table of overrides."""

    def built() -> tuple[nn.Module, Call]:
        try:
            model = strengthened(build())
        except CannotBuildError:
            raise
        except Exception as error:
            raise CannotBuildError(f"{type(error).__name__}: {error}") from error
        call = Call(model, {key: parsed(text) for key, text in inputs.items()})
        try:
            call()
        except Exception as error:
            raise CannotBuildError(f"cannot be run: {type(error).__name__}: {error}") from error
        return model, call

    return Subject(library, name, built)
