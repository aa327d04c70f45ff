"""Every refusal of a position module says the rule and what arrived."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polyhead.errors import DeviceError, DtypeError, OptionError, PolyheadError, ShapeError
from polyhead.geometry import HeadLayout
from polyhead.layers.positions import (
    ALiBi,
    DynamicNTKScaling,
    Learned,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    QuadraticRelative1D,
    QuadraticRelative2D,
    Rotary,
    Sinusoidal,
    T5Bias,
    YarnScaling,
)

X = torch.zeros(3, 5, 19, 26)
E = torch.zeros(3, 19, 26)
LAYOUT = HeadLayout(130, 5)

REFUSALS: list[tuple[str, Callable[[], object], type[PolyheadError], str]] = [
    # Rotary
    ("odd rotary_dim", lambda: Rotary(26, rotary_dim=13), ShapeError, r"rotary_dim must be even.* got 13"),
    ("odd head_dim", lambda: Rotary(13), ShapeError, r"rotary_dim must be even.* got 13"),
    ("wide rotary_dim", lambda: Rotary(26, rotary_dim=28), ShapeError, r"must not exceed head_dim, got 28 and 26"),
    ("no rotary_dim", lambda: Rotary(26, rotary_dim=0), ShapeError, r"rotary_dim must be at least 1, got 0"),
    ("head_dim no integer", lambda: Rotary(26.0), ShapeError, r"head_dim must be an integer, got 26.0"),
    ("zero base", lambda: Rotary(26, base=0), OptionError, r"base must be positive and finite, got 0"),
    ("negative base", lambda: Rotary(26, base=-1.0), OptionError, r"base must be positive and finite, got -1.0"),
    ("infinite base", lambda: Rotary(26, base=float("inf")), OptionError, r"base must be positive and finite, got inf"),
    ("scaling by name", lambda: Rotary(26, scaling="linear"), OptionError, r"LinearScaling\(2.0\), got 'linear'"),
    ("other width", lambda: Rotary(24)(X), ShapeError, r"head_dim=24\], got shape \[3, 5, 19, 26\]"),
    ("three dimensions", lambda: Rotary(26)(E), ShapeError, r"\[batch, heads, sequence, .*got shape \[3, 19, 26\]"),
    ("integer tokens", lambda: Rotary(26)(X.long()), DtypeError, r"floating-point tensors, got torch.int64"),
    ("negative offset", lambda: Rotary(26)(X, -1), OptionError, r"offset must not be negative, got -1"),
    ("float offset", lambda: Rotary(26)(X, 1.0), DtypeError, r"an integer or an integer tensor, got float"),
    ("boolean offset", lambda: Rotary(26)(X, True), DtypeError, r"an integer or an integer tensor, got bool"),
    ("float positions", lambda: Rotary(26)(X, torch.zeros(19)), DtypeError, r"must be integers, got torch.float32"),
    (
        "boolean positions",
        lambda: Rotary(26)(X, torch.zeros(19, dtype=torch.bool)),
        DtypeError,
        r"must be integers, got torch.bool",
    ),
    ("too few positions", lambda: Rotary(26)(X, torch.arange(17)), ShapeError, r"a sequence of 19, got \[17\]"),
    ("scalar positions", lambda: Rotary(26)(X, torch.tensor(3)), ShapeError, r"a sequence of 19, got \[\]"),
    (
        "positions of heads",
        lambda: Rotary(26)(X, torch.zeros(3, 5, 19, dtype=torch.long)),
        ShapeError,
        r"\[sequence\] or \[batch, sequence\] with a sequence of 19, got \[3, 5, 19\]",
    ),
    (
        "positions of another batch",
        lambda: Rotary(26)(X, torch.zeros(5, 19, dtype=torch.long)),
        ShapeError,
        r"each of the 3 sequences of the batch, got \[5, 19\]",
    ),
    (
        "positions elsewhere",
        lambda: Rotary(26)(X, torch.arange(19, device="meta")),
        DeviceError,
        r"the device of the tokens, got meta and cpu",
    ),
    (
        "dynamic scaling without a length",
        lambda: Rotary(26, scaling=DynamicNTKScaling(2.0, 7))(X, torch.arange(19)),
        OptionError,
        r"needs the current length with a tensor of positions, got length=None; pass length=",
    ),
    (
        "a rotation of one token for many",
        lambda: Rotary(26).rotate(X, Rotary(26).rotation(X[:, :, :1], 7)),
        ShapeError,
        r"of 1 tokens of head_dim=26, got shape \[3, 5, 19, 26\]; keys .* need a rotation of their own",
    ),
    (
        "a rotation of another width",
        lambda: Rotary(26).rotate(X[..., :24], Rotary(26).rotation(X)),
        ShapeError,
        r"of 19 tokens of head_dim=26, got shape \[3, 5, 19, 24\]",
    ),
    (
        "rotary for other heads",
        lambda: Rotary(24).check(LAYOUT),
        ShapeError,
        r"for a layer with head_dim 26",
    ),
    # scalings
    ("factor below 1", lambda: LinearScaling(0.5), OptionError, r"factor must be at least 1, got 0.5"),
    ("factor of 0", lambda: YarnScaling(0, 64), OptionError, r"factor must be positive and finite, got 0"),
    ("nan factor", lambda: NTKScaling(float("nan")), OptionError, r"factor must be positive and finite, got nan"),
    ("no original length", lambda: DynamicNTKScaling(2.0, 0), ShapeError, r"original_length must be at least 1, got 0"),
    ("one pair", lambda: Rotary(2, scaling=NTKScaling(2.0)), OptionError, r"rotary_dim of at least 4, got 2"),
    (
        "one pair, dynamic",
        lambda: Rotary(26, rotary_dim=2, scaling=DynamicNTKScaling(2.0, 7)),
        OptionError,
        r"DynamicNTKScaling needs a rotary_dim of at least 4, got 2",
    ),
    ("crossed betas", lambda: YarnScaling(2.0, 64, 1, 32), OptionError, r"at least beta_slow, got 1 and 32"),
    (
        "zero attention factor",
        lambda: YarnScaling(2.0, 64, attention_factor=0.0),
        OptionError,
        r"attention_factor must be positive and finite, got 0.0",
    ),
    ("base of 1", lambda: Rotary(26, base=1, scaling=YarnScaling(2.0, 64)), OptionError, r"a base above 1, got 1"),
    (
        "crossed frequencies",
        lambda: Llama3Scaling(8.0, 4.0, 1.0),
        OptionError,
        r"larger than low_freq_factor, got 1.0 and 4.0",
    ),
    # biases
    ("no heads", lambda: ALiBi(0), ShapeError, r"num_heads must be at least 1, got 0"),
    (
        "biases of other heads",
        lambda: ALiBi(7).check(LAYOUT),
        ShapeError,
        r"=7\) for a layer with num_heads 5",
    ),
    ("negative length", lambda: ALiBi(5).mask(-1, 3), OptionError, r"query_length must not be negative, got -1"),
    ("odd buckets", lambda: T5Bias(5, num_buckets=13), OptionError, r"even and at least 4 when bidirectional, got 13"),
    ("two buckets", lambda: T5Bias(5, num_buckets=2), OptionError, r"at least 4 when bidirectional, got 2"),
    ("one bucket", lambda: T5Bias(5, num_buckets=1, bidirectional=False), OptionError, r"at least 2, got 1"),
    (
        "short max_distance",
        lambda: T5Bias(5, max_distance=8),
        OptionError,
        r"exceed the 8 distances that have their own of 32 buckets, got 8",
    ),
    ("zero alpha", lambda: QuadraticRelative1D(5, alpha=0.0), OptionError, r"alpha must be positive.* got 0.0"),
    ("negative spread", lambda: QuadraticRelative1D(5, center_std=-1), OptionError, r"at least 0 and finite, got -1"),
    (
        "too few shifts",
        lambda: QuadraticRelative1D(5).attend_to([1, 2]),
        ShapeError,
        r"a shift of 1 numbers for each of the 5 heads, got 2 of 1",
    ),
    (
        "flat shifts for a grid",
        lambda: QuadraticRelative2D(5, 3, 4).attend_to([1, 2, 3, 4, 5]),
        ShapeError,
        r"a shift of 2 numbers for each of the 5 heads, got 5 of 1",
    ),
    ("empty grid", lambda: QuadraticRelative2D(5, 0, 4), ShapeError, r"height must be at least 1, got 0"),
    (
        "another grid",
        lambda: QuadraticRelative2D(5, 3, 7).mask(19, 19),
        ShapeError,
        r"the 21 cells of the 3 x 7 grid, got 19 and 19; pass grid=\(height, width\)",
    ),
    (
        "queries that are not the keys",
        lambda: QuadraticRelative2D(5, 3, 7).mask(1, 21),
        ShapeError,
        r"the 21 cells of the 3 x 7 grid, got 1 and 21",
    ),
    # absolute
    ("sinusoids of another width", lambda: Sinusoidal(24)(E), ShapeError, r"embed_dim=24\], got \[3, 19, 26\]"),
    ("learned for heads", lambda: Learned(97, 26)(X), ShapeError, r"embed_dim=26\], got \[3, 5, 19, 26\]"),
    ("integer input", lambda: Sinusoidal(26)(E.long()), DtypeError, r"floating-point tensors, got torch.int64"),
    (
        "input of another width",
        lambda: Sinusoidal(26).check(LAYOUT),
        ShapeError,
        r"embed_dim=26\) for a layer with embed_dim 130",
    ),
    ("no positions", lambda: Learned(0, 26), ShapeError, r"max_length must be at least 1, got 0"),
    (
        "beyond the table",
        lambda: Learned(23, 26)(E, 5),
        ShapeError,
        r"has the positions 0 to 22, got position 23; build it with max_length=24 or shorten the sequence",
    ),
    (
        "a tensor beyond the table",
        lambda: Learned(23, 26)(E, torch.arange(19) + 8),
        ShapeError,
        r"has the positions 0 to 22, got position 26; build it with max_length=27",
    ),
    (
        "a tensor before the table",
        lambda: Learned(23, 26)(E, torch.arange(19) - 2),
        ShapeError,
        r"has the positions 0 to 22, got position -2; count from 0",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "words"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
def test_bad_input_is_refused_with_the_rule_and_what_arrived(
    call: Callable[[], object], error: type[PolyheadError], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


def test_modules_that_fit_pass_the_check() -> None:
    for module in (Rotary(26), ALiBi(5), T5Bias(5), QuadraticRelative2D(5, 3, 7), Sinusoidal(130), Learned(97, 130)):
        module.check(LAYOUT)


def test_options_of_a_rotary_cannot_be_changed_behind_its_table() -> None:
    rotary = Rotary(26)
    for name in ("base", "rotary_dim", "interleaved", "scaling"):
        with pytest.raises(AttributeError):
            setattr(rotary, name, 3)
