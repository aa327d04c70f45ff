"""Validation of inspections that were read from files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from polyhead.errors import OptionError
from polyhead.files import as_type, build, short
from polyhead.inspection.heads import Head
from polyhead.inspection.result import Inspection
from polyhead.inspection.vocabulary import ROLE_ORDER
from polyhead.inspection.wording import Reason, words_of
from polyhead.observation import AttentionSite
from polyhead.ops.profile import offset_bins

MAX_HEADS, MAX_LAYERS = 1 << 16, 1 << 20
_FACTS: Mapping[str, Any] = {
    "model": str,
    "name": str,
    "kind": str,
    "documents": int,
    "contexts": int,
    "context": int,
    "tokens": int,
    "text": str | None,
    "unknown": float,
    "intervals_over": str,
    "pairs_by": Mapping[str, Any] | None,
    "chance": bool,
    "materialised": int,
    "importance_tokens": int | None,
    "importance_context": int,
    "loss": str | None,
    "mean_loss": float,
    "document_losses": tuple[tuple[float, float], ...],
    "interrupted": bool,
    "read": bool,
    "left_out": tuple[Mapping[str, Any], ...],
    "seconds": float,
    "versions": Mapping[str, str],
}


def check_facts(facts: object) -> dict[str, Any]:
    """Return the facts of a run, each checked for its type; those that older versions did not write may be absent."""
    if not isinstance(facts, dict) or not {"model", "tokens"} <= facts.keys():
        raise OptionError(f"the facts of a run must have a model and tokens, got {short(facts)}")
    checked = {
        name: as_type(value, _FACTS[name], f"{name} among the facts") if name in _FACTS else value
        for name, value in facts.items()
    }
    if checked.get("pairs_by") is not None:
        checked["pairs_by"] = _reason(checked["pairs_by"])
    if "left_out" in checked:
        checked["left_out"] = tuple(_reason(found) for found in checked["left_out"])
    return checked


def _reason(saved: Mapping[str, Any]) -> Reason:
    """Return a saved reason; raise if it lacks a value of its text, which is generated anew."""
    reason = build(Reason, {name: value for name, value in saved.items() if name != "text"})
    with _needing_values("a reason", reason.kind):
        _ = reason.text
    return reason


@contextmanager
def _needing_values(what: str, kind: str) -> Iterator[None]:
    """Turn errors of generating a text from missing or wrong values into an OptionError."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise OptionError(f"{what} must have the values that its text needs, got {short(kind)}: {error!r}") from None


def check_sites(sites: list[AttentionSite]) -> None:
    """Check layers, numbers of heads and the uniqueness of sites."""
    for site in sites:
        if not (0 <= site.layer < MAX_LAYERS and 1 <= site.num_heads <= MAX_HEADS):
            raise OptionError(
                f"a site must have a layer of at least 0 and 1 to {MAX_HEADS:,} heads, got layer {site.layer} and "
                f"{site.num_heads} heads in {short(site.name)}"
            )
    names = [(site.name, site.kind) for site in sites]
    if len(set(names)) < len(names):
        raise OptionError("sites must be unique, got one twice")


def check_table(inspection: Inspection) -> None:
    """Check that the table has one row per head and a column for each statistic."""
    table = inspection.table
    if not len(table):
        raise OptionError("the table must have a row for each head, got none")
    for head in zip(table.sites, table.heads, strict=True):
        check_head(head)
    if len(set(zip(table.sites, table.heads, strict=True))) < len(table):
        raise OptionError("a head must have one row of the table, got two")
    missing = [name for name in ("tokens", *table.names) if name not in table.columns]
    if missing:
        raise OptionError(f"the table must have a column for each statistic, got none for {short(missing[0])}")


def check_run(inspection: Inspection) -> None:
    """Check that roles are known, and that scores and findings have the values that their text needs."""
    for head_roles in inspection.roles:
        check_head((head_roles.site, head_roles.head))
        unknown = [score.role for score in head_roles.scores if score.role not in ROLE_ORDER]
        if unknown:
            raise OptionError(f"a role must be one of {', '.join(ROLE_ORDER)}; got {short(unknown[0])}")
        for score in head_roles.scores:
            with _needing_values("a score", score.role):
                _ = score.text
    for finding in inspection.findings:
        with _needing_values("a finding", finding.kind):
            words_of(finding), words_of(finding, "zh")
    for site, keys in inspection.top_keys.items():
        if len(keys) > site.num_heads:
            raise OptionError(f"top keys must be of {site.num_heads} heads, got {len(keys)}")


def check_tensors(inspection: Inspection) -> None:
    """Check the shapes of matrices, maps, spectra, effects of documents, halves and examples."""
    for site, matrices in inspection.relations.items():
        for name, matrix in matrices.items():
            _check_shape(f"{short(name)} of {short(site.name)}", matrix, (site.num_heads, site.num_heads))
    bins = (0, len(offset_bins()))
    for site, maps in inspection.head_maps.items():
        if maps.block < 1:
            raise OptionError(f"a block of a map must have at least 1 token, got {maps.block}")
        side = maps.map.shape[-1] if maps.map.ndim == 3 else -1
        _check_shape(f"the map of {short(site.name)}", maps.map, (site.num_heads, side, side))
        _check_shape(f"the offsets of {short(site.name)}", maps.offsets, (site.num_heads, None))
        if maps.offsets.shape[-1] not in bins:
            raise OptionError(f"offsets must have {bins[1]} bins, got {maps.offsets.shape[-1]}")
    for site, spectra in inspection.spectra.items():
        for name, spectrum in spectra.items():
            _check_shape(f"the spectrum {short(name)} of {short(site.name)}", spectrum, (site.num_heads, None))
    for site, effects in inspection.influence.items():
        for name, effect in effects.items():
            _check_shape(f"the influence on {short(name)} of {short(site.name)}", effect, (None, site.num_heads))
    for site, of_site in inspection.halves.items():
        for name, values in of_site.items():
            _check_shape(f"the halves of {short(name)} of {short(site.name)}", values, (2, site.num_heads))
    for example in inspection.examples:
        for site, weights in example.weights.items():
            shape = (site.num_heads, len(example.queries), len(example.keys))
            _check_shape(f"the weights of {short(example.title)} at {short(site.name)}", weights, shape)


def check_head(head: Head) -> None:
    """Check that the site of a head has a head of that number."""
    if isinstance(head[1], bool) or not isinstance(head[1], int) or not 0 <= head[1] < head[0].num_heads:
        raise OptionError(f"a head of {short(head[0].name)} must be 0 to {head[0].num_heads - 1}, got {short(head[1])}")


def _check_shape(what: str, x: Tensor, shape: tuple[int | None, ...]) -> None:
    fits = x.ndim == len(shape) and all(size in (None, actual) for size, actual in zip(shape, x.shape, strict=True))
    if not fits or not x.is_floating_point():
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise OptionError(
            f"{what} must be floating-point numbers of shape [{expected}], got {list(x.shape)} of {x.dtype}"
        )
