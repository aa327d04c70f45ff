"""Current names of statistics, for files that were saved with earlier names."""

from __future__ import annotations

_RENAMED = {
    "reach": "mean_distance",
    "signed_reach": "mean_offset",
    "reach_squared": "mean_squared_distance",
    "entropy_share": "normalized_entropy",
    "contribution": "output_norm",
    "contribution_share": "output_norm_share",
}
_SUFFIXES = {"_spread": "_std", "_max": "_max", "_error": "_error"}


def current_name(column: str) -> str:
    """Return the current name of a statistic or of a column of the table of heads.

    >>> current_name("reach_spread"), current_name("entropy_max")
    ('mean_distance_std', 'entropy_max')
    """
    for suffix, current in _SUFFIXES.items():
        if column.endswith(suffix):
            name = column.removesuffix(suffix)
            return _RENAMED.get(name, name) + current
    return _RENAMED.get(column, column)
