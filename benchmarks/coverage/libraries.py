"""The libraries of a coverage run, and their models beside those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.catalogue import CannotBuildError, Subject, of_tensors, transformers_subjects
from benchmarks.coverage.classics import CLASSICS, WIDTH, classic
from benchmarks.coverage.shrinking import table

_OPERATORS: list[torch.library.Library] = []  # declarations end with their library


def _declare_operators() -> None:
    """Declare the two operators whose absence keeps torchvision from being imported.

    Its package is built for one version of torch; beside another, or a CPU build, its compiled operators do not load.
    Vision transformers use none of them.
    """
    if not _OPERATORS and find_spec("torchvision") is not None:
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _OPERATORS.append(library)


def _subject(library: str, name: str, build: Callable[[], nn.Module], **inputs: str) -> Subject:
    """Return a model of a library that may be missing."""

    def built() -> nn.Module:
        if find_spec(library) is None:
            raise CannotBuildError(f"{library} is not installed")
        return build()

    return of_tensors(library, name, built, **inputs)


def timm_subjects() -> Iterator[Subject]:
    """Yield transformer models of timm, by name, with the arguments of the table."""
    for name, entry in table()["timm"].items():
        yield _subject("timm", name, partial(_timm, name, entry), x=f"float 2,3,{_size(entry)},{_size(entry)}")


def _size(entry: dict[str, Any]) -> int:
    return int(entry.get("input", entry.get("img_size", 64)))


def _timm(name: str, entry: dict[str, Any]) -> nn.Module:
    import timm

    arguments = {key: value for key, value in entry.items() if key != "input"}
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=5, **arguments)
    return model


def diffusers_subjects() -> Iterator[Subject]:
    """Yield transformer models of diffusers that the table has arguments for."""
    for name, entry in table()["diffusers"].items():
        yield _subject("diffusers", name, partial(_diffusers, name, entry["config"]), **entry["inputs"])


def _diffusers(name: str, config: dict[str, Any]) -> nn.Module:
    import diffusers

    model: nn.Module = getattr(diffusers, name)(**config)
    return model


def torchvision_subjects() -> Iterator[Subject]:
    """Yield the vision transformers of torchvision."""
    for name in ("VisionTransformer", "SwinTransformer", "SwinTransformer V2", "MaxVit"):
        yield _subject("torchvision", name, partial(_torchvision, name), x="float 2,3,64,64")


def _torchvision(name: str) -> nn.Module:
    from torchvision.models import MaxVit, SwinTransformer, VisionTransformer
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    model: nn.Module
    if name == "VisionTransformer":
        model = VisionTransformer(64, 16, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=40)
    elif name == "MaxVit":
        model = MaxVit((64, 64), 8, 4, [8, 16], [1, 1], 8, 0.0, num_classes=5)
    else:
        options: dict[str, Any] = (
            {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2} if name.endswith("V2") else {}
        )
        model = SwinTransformer([4, 4], 12, [2, 2], [3, 3], [4, 4], num_classes=5, **options)
    return model


def classics_subjects() -> Iterator[Subject]:
    """Yield attention as it is written by hand."""
    for name in CLASSICS:
        yield of_tensors("classics", name, partial(classic, name), input=f"float 2,13,{WIDTH}")


def _with_operators(subjects: Callable[[], Iterator[Subject]]) -> Callable[[], list[Subject]]:
    def found() -> list[Subject]:
        _declare_operators()
        return [*subjects()]

    return found


LIBRARIES: dict[str, Callable[[], list[Subject]]] = {
    name: _with_operators(subjects)
    for name, subjects in {
        "transformers": transformers_subjects,
        "timm": timm_subjects,
        "diffusers": diffusers_subjects,
        "torchvision": torchvision_subjects,
        "classics": classics_subjects,
    }.items()
}
