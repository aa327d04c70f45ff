"""The registered attention function with each argument that models and callers pass."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the attention function serves models of transformers")

import polyhead.integrations.huggingface
from polyhead import Mask
from polyhead.errors import MaskError, OptionError, PolyheadError
from polyhead.integrations.huggingface import attention as ours
from polyhead.integrations.huggingface.arguments import PLUMBING, REFUSED
from tests.error_budget import plain_formula
from tests.integrations.huggingface.compare import implementation
from tests.integrations.huggingface.models import DECODERS, build, tokens

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH, VALUE_WIDTH = 2, 6, 3, 5, 7, 11, 13


class Attention(nn.Module):
    """All that the function reads of a module."""

    def __init__(self, is_causal: bool | None = False) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def states(queries: int = QUERIES, keys: int = KEYS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return (
        noise(BATCH, HEADS, queries, WIDTH),
        noise(BATCH, KV_HEADS, keys, WIDTH),
        noise(BATCH, KV_HEADS, keys, VALUE_WIDTH),
    )


def causal(queries: int, keys: int, offset: int = 0) -> Tensor:
    return torch.arange(keys) <= torch.arange(queries)[:, None] + offset


def check(result: tuple[Tensor, Tensor | None], *qkv: Tensor, **options: object) -> None:
    expected = plain_formula(*qkv, **options).output.transpose(1, 2)
    # float64 on both sides: what is left is the order of the sums.
    torch.testing.assert_close(result[0], expected, rtol=1e-12, atol=1e-12)
    assert result[0].is_contiguous()


@pytest.mark.parametrize(
    ("module", "argument", "queries", "expected"),
    [
        (Attention(True), None, 7, True),
        (Attention(True), False, 7, False),
        (Attention(False), None, 7, False),
        (Attention(False), True, 7, True),
        (Attention(None), None, 7, False),  # an encoder that does not say
        (Attention(True), None, 1, False),  # the last token sees all
    ],
)
def test_without_a_mask_the_module_says_whether_it_is_causal(module, argument, queries, expected):
    qkv = states(queries)
    result = ours.attend(module, *qkv, None, is_causal=argument)
    check(result, *qkv, visible=causal(queries, KEYS) if expected else None)


def test_a_causal_module_without_a_mask_leaves_the_rest_of_a_preallocated_cache_alone():
    query, key, value = states()
    result = ours.attend(Attention(True), query, key, value, None)
    check(result, query, key[:, :, :QUERIES], value[:, :, :QUERIES], visible=causal(QUERIES, QUERIES))


def test_a_mask_that_arrives_rules_alone():
    qkv = states()
    seen = torch.rand(BATCH, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.7
    seen[..., 0] = True
    result = ours.attend(Attention(True), *qkv, seen, sliding_window=2)
    check(result, *qkv, visible=seen)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_window_without_a_mask(is_causal):
    qkv = states(KEYS)
    distance = torch.arange(KEYS) - torch.arange(KEYS)[:, None]
    seen = (distance <= 0) & (distance > -3) if is_causal else distance.abs() <= 3
    check(ours.attend(Attention(is_causal), *qkv, None, sliding_window=3), *qkv, visible=seen)
    single = states(1)
    last = torch.arange(KEYS) >= KEYS - 3
    if is_causal:
        check(ours.attend(Attention(True), *single, None, sliding_window=3), *single, visible=last)


def test_scale_softcap_and_sinks():
    qkv = states()
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    result = ours.attend(Attention(), *qkv, None, scaling=0.7, softcap=1.5, s_aux=sinks, output_attentions=True)
    check(result, *qkv, scale=0.7, softcap=1.5, sinks=sinks)
    weights = plain_formula(*qkv, scale=0.7, softcap=1.5, sinks=sinks).weights
    torch.testing.assert_close(result[1], weights, rtol=1e-12, atol=1e-12)
    factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    output = ours.attend(Attention(), *qkv, None, scaling=factor)[0]
    check((output.detach(), None), *qkv, scale=0.7)
    output.sum().backward()
    assert factor.grad is not None


@pytest.mark.parametrize("mask", ["none", "boolean", "additive", "described"])
def test_a_position_bias_is_added_under_every_mask(mask):
    qkv = states()
    bias = torch.randn(1, HEADS, QUERIES, KEYS, dtype=torch.float64, requires_grad=True)
    seen = causal(QUERIES, KEYS, KEYS - QUERIES)[None, None]
    handed = {
        "none": None,
        "boolean": seen,
        "additive": torch.where(seen, 0.0, -torch.inf).double(),
        "described": polyhead.integrations.huggingface.DescribedMask(
            Mask.causal(), (BATCH, 1, QUERIES, KEYS), torch.float64, torch.device("cpu")
        ),
    }[mask]
    result = ours.attend(Attention(), *qkv, handed, position_bias=bias)
    visible = None if mask == "none" else seen
    check((result[0].detach(), None), *qkv, visible=visible, bias=bias.detach())
    result[0].square().sum().backward()
    assert bias.grad.abs().sum() > 0


def test_keys_are_not_repeated(monkeypatch):
    taken = []
    attention = ours.attention
    monkeypatch.setattr(ours, "attention", lambda *args, **kwargs: taken.append(args) or attention(*args, **kwargs))
    query, key, value = states()
    ours.attend(Attention(), query, key, value, None)
    assert taken[0][1] is key
    assert taken[0][2] is value


def test_weights_after_dropout_are_those_that_met_the_values():
    module = Attention().train()
    query, key, value = states()
    output, weights = ours.attend(module, query, key, value, None, dropout=0.4, output_attentions=True)
    grouped = value.repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close((weights @ grouped).transpose(1, 2), output, rtol=1e-12, atol=1e-12)
    assert 0.2 < float((weights == 0).double().mean()) < 0.6
    torch.testing.assert_close(
        ours.attend(module.eval(), query, key, value, None, dropout=0.4)[0],
        ours.attend(module, query, key, value, None)[0],
    )


def test_a_head_mask_scales_heads_and_their_weights():
    qkv = states()
    gates = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0, 1.0])
    plain = ours.attend(Attention(), *qkv, None, output_attentions=True)
    for name in ("head_mask", "layer_head_mask"):
        for shape in ((HEADS,), (1, HEADS, 1, 1)):
            gated = ours.attend(Attention(), *qkv, None, output_attentions=True, **{name: gates.view(shape)})
            torch.testing.assert_close(gated[0], plain[0] * gates[:, None])
            torch.testing.assert_close(gated[1], plain[1] * gates[:, None, None])
    with pytest.raises(OptionError, match=r"head_mask must be .* got shape \[5\] for 6 heads"):
        ours.attend(Attention(), *qkv, None, head_mask=torch.ones(5))
    with pytest.raises(OptionError, match="got both"):
        ours.attend(Attention(), *qkv, None, head_mask=gates, layer_head_mask=gates)


def test_picked_keys_are_the_only_ones_seen():
    qkv = states()
    picked = torch.tensor([[[0, 3]] * QUERIES, [[1, 6]] * QUERIES])
    seen = torch.zeros(BATCH, 1, QUERIES, KEYS, dtype=torch.bool)
    seen[0, ..., [0, 3]] = True
    seen[1, ..., [1, 6]] = True
    check(ours.attend(Attention(), *qkv, None, indices=picked), *qkv, visible=seen)


@pytest.mark.parametrize("said", ["cumulative lengths", "sequence numbers"])
def test_packed_sequences_by_arguments(said):
    query, key, value = (x[:1] for x in states(KEYS))
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    ends = torch.tensor([0, 3, 5, 7])
    options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends} if said == "cumulative lengths" else {"seq_idx": ids[None]}
    result = ours.attend(Attention(True), query, key, value, None, max_length_q=3, max_length_k=3, **options)
    check(result, query, key, value, visible=causal(KEYS, KEYS) & (ids == ids[:, None]))
    with pytest.raises(OptionError, match="cu_seq_lens_q and cu_seq_lens_k must both be passed"):
        ours.attend(Attention(True), *states(KEYS), None, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    with pytest.raises(OptionError, match=r"seq_idx must be .* got shape \[1, 7\] for 5 queries and 7 keys"):
        ours.attend(Attention(), *states(), None, seq_idx=ids[None])


@pytest.mark.parametrize("name", [*REFUSED, "banana"])
def test_unsupported_arguments_are_rejected_by_name(name):
    with pytest.raises(PolyheadError, match=f"does not support the argument '{name}', got a tensor of shape"):
        ours.attend(Attention(), *states(), None, **{name: torch.ones(3)})
    ours.attend(Attention(), *states(), None, **{name: None})


def test_a_model_refuses_what_its_caller_passes_down():
    model = build(DECODERS[2])
    with implementation(model, "polyhead"), pytest.raises(OptionError, match="'alibi_slopes'"):
        model(input_ids=tokens(), alibi_slopes=torch.ones(4))


@pytest.mark.parametrize("name", [*sorted(PLUMBING), "output_router_logits", "pixel_values", "image_grid_thw"])
def test_irrelevant_arguments_are_ignored(name):
    qkv = states()
    plain = ours.attend(Attention(), *qkv, None)[0]
    assert torch.equal(ours.attend(Attention(), *qkv, None, **{name: torch.ones(3)})[0], plain)


def test_masks_of_the_wrong_kind_are_refused():
    qkv = states()
    with pytest.raises(MaskError, match=r"boolean .* or floating point .* got torch.int64 of shape \[2, 1, 5, 7\]"):
        ours.attend(Attention(), *qkv, torch.ones(BATCH, 1, QUERIES, KEYS, dtype=torch.int64))
    with pytest.raises(MaskError, match="attention_mask must be a tensor, got dict"):
        ours.attend(Attention(), *qkv, {"full_attention": None})


@pytest.mark.parametrize("shape", [(QUERIES, KEYS), (1, QUERIES, KEYS), (1, 1, QUERIES, KEYS + 4), (BATCH, 1, 1, KEYS)])
def test_masks_broadcast_as_they_do_in_eager(shape):
    qkv = states()
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
    seen[..., 0] = True
    check(ours.attend(Attention(), *qkv, seen), *qkv, visible=seen[..., :KEYS])


def test_a_mask_made_for_other_sizes_is_read_as_the_tensor_it_stands_for():
    qkv = states()
    longer = polyhead.integrations.huggingface.DescribedMask(
        Mask.causal() & Mask.positions(torch.arange(QUERIES) + 2, torch.arange(KEYS + 6)),
        (1, 1, QUERIES, KEYS + 6), torch.float64, torch.device("cpu"),
    )  # fmt: skip
    check(ours.attend(Attention(), *qkv, longer), *qkv, visible=causal(QUERIES, KEYS, 2))


def test_registering_fills_both_registries_and_twice_is_once():
    from transformers import AttentionInterface, AttentionMaskInterface

    assert polyhead.integrations.huggingface.register() == polyhead.integrations.huggingface.register() == "polyhead"
    assert AttentionInterface()["polyhead"] is ours.attend
    assert AttentionMaskInterface()["polyhead"].__name__ == "make_mask"


@cache
def lines_without_transformers() -> list[str]:
    """Import the package, print whether transformers came along, then do without transformers what needs it."""
    program = """
import sys
import polyhead.integrations.huggingface
print("transformers" in sys.modules)
sys.modules["transformers"] = None
for act in (polyhead.integrations.huggingface.register, polyhead.integrations.huggingface.families):
    try:
        act()
    except polyhead.integrations.huggingface.registration.OptionError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_the_package_does_not_import_transformers():
    assert lines_without_transformers()[0] == "False"


def test_without_transformers_the_error_says_what_to_install():
    _, *lines = lines_without_transformers()
    assert len(lines) == 2
    assert all("pip install 'polyhead[hf]'" in line for line in lines)
