"""Direct effects of heads on logits: as materialised attention gives them, for models that have a direct path."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

import polyhead
from polyhead.observation import BatchMetadata, find_projections
from polyhead.observation.direct_logits import DirectLogits, find_direct_logits
from polyhead.observation.role_evidence import EvidenceCollector, HeadEvidence
from polyhead.observation.role_evidence_rows import COLUMNS, COPY_ROWS, COPY_WEIGHT
from polyhead.sources.token_class import TokenClass

VOCAB, WIDTH, LAYERS, HEADS = 53, 48, 2, 6
SPECIAL = 7
LENGTHS = (71, 97, 13)  # more rows than are sampled, and fewer


def model_of(name: str, **options) -> transformers.PreTrainedModel:
    """Weights large enough to attend to single tokens, and norms whose weights matter."""
    sizes = {"gpt2": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 128}}.get(
        name, {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 64}
    )
    config = transformers.AutoConfig.for_model(name, vocab_size=VOCAB, **sizes, **options)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.5) + (parameter.ndim == 1))
    return model


MODELS = {
    "llama": {"num_key_value_heads": 2},
    "gpt2": {},  # LayerNorm, Conv1D, biases
    "gpt_neox": {"use_parallel_residual": True},
    "gemma": {"num_key_value_heads": 3, "head_dim": 8},  # stores the weights of norms minus one
}


def tokens_of() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return ids, mask.long()


def path_of(model: transformers.PreTrainedModel) -> DirectLogits | None:
    def run() -> object:
        return model(input_ids=tokens_of()[0][:1, :16], use_cache=False)

    return find_direct_logits(model, run, find_projections(model, run))


@torch.no_grad()
def evidence_of(model: transformers.PreTrainedModel, rows: list[int], crop: bool = False) -> dict[int, HeadEvidence]:
    collector = EvidenceCollector(direct_logits=path_of(model))
    ids, mask = (x[rows] for x in tokens_of())
    if crop:
        ids, mask = (x[:, : int(mask.sum(-1).max())] for x in (ids, mask))
    classes = torch.where(ids == SPECIAL, int(TokenClass.SPECIAL), int(TokenClass.WORD))
    with polyhead.observe(model, statistics=False, collect=[collector]) as session:
        session.metadata = BatchMetadata(documents=torch.tensor(rows), tokens=ids, classes=classes)
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    return {site.layer: states["evidence"] for site, states in session.observations.collected.items()}


@torch.no_grad()
def by_hand(model: transformers.PreTrainedModel, ids: Tensor) -> Tensor:
    """Wins and pairs of every head of one text, [layers, heads, 2]: weights, outputs and logits in full."""
    model.set_attn_implementation("eager")
    base, blocks = model.base_model, next(x for x in model.modules() if isinstance(x, torch.nn.ModuleList))
    inputs, outputs = {}, {}
    for number, block in enumerate(blocks):
        names = ("self_attn.o_proj", "attn.c_proj", "attention.dense")
        (projection,) = (x for name, x in block.named_modules() if name in names)
        hook = projection.register_forward_pre_hook(lambda _, x, number=number: inputs.update({number: x[0][0]}))
        outputs[number] = (projection, hook)
    norm = next(x for name, x in base.named_children() if name in ("norm", "ln_f", "final_layer_norm"))
    final = {}
    hook = norm.register_forward_pre_hook(lambda _, x: final.update(stream=x[0][0]))
    attentions = model(input_ids=ids[None], output_attentions=True, use_cache=False).attentions
    for x in (hook, *(x for _, x in outputs.values())):
        x.remove()
    sums = torch.zeros(LAYERS, HEADS, 2, dtype=torch.float64)
    length = len(ids)
    rows = sorted({k * length // COPY_ROWS for k in range(COPY_ROWS)})
    for layer, weights in enumerate(attentions):
        heads = inputs[layer].unflatten(-1, (HEADS, -1))
        weight = outputs[layer][0].weight
        matrix = (weight if type(outputs[layer][0]).__name__ == "Conv1D" else weight.T).unflatten(0, heads.shape[1:])
        for head in range(HEADS):
            attended = {}
            for row in rows:
                p = weights[0, head, row].clone()
                p[[0, row]] = 0
                p[ids == SPECIAL] = 0
                if float(p.max()) >= COPY_WEIGHT:
                    attended[row] = int(ids[int(p.argmax())])
            # The direct effect: what the logits lose with the norm's statistics of the intact stream.
            chosen, tokens = list(attended), torch.tensor(list(attended.values()), dtype=torch.int64)
            stream, added = final["stream"][chosen], heads[chosen, head] @ matrix[head]
            centre = isinstance(norm, torch.nn.LayerNorm)
            scale = (stream.var(-1, unbiased=False) if centre else stream.square().mean(-1)).sqrt()[:, None]
            gain = norm.weight + 1 if "Gemma" in type(norm).__name__ else norm.weight
            written = (added - centre * added.mean(-1, keepdim=True)) / scale * gain
            logits = (written @ model.get_output_embeddings().weight.T)[:, tokens]  # of each row on each row's token
            others = tokens[:, None] != tokens
            wins = others & (logits.diagonal()[:, None] > logits)
            sums[layer, head] = torch.tensor([float(wins.sum()), float(others.sum())])
    return sums


@pytest.mark.parametrize("name", MODELS)
def test_wins_and_pairs_are_those_of_materialised_attention(name):
    model = model_of(name, **MODELS[name])
    found = evidence_of(model, [0, 1, 2])
    for text, length in enumerate(LENGTHS):
        exact = by_hand(model, tokens_of()[0][text, :length])
        assert exact[..., 1].max() > 50
        for layer, evidence in found.items():
            numbers = torch.stack([evidence.column(x)[text, :-1] for x in ("copy_wins", "copy_pairs")], -1)
            torch.testing.assert_close(numbers, exact[layer], rtol=0, atol=0)


def test_texts_have_the_same_sums_whatever_they_are_batched_with():
    model = model_of("llama", num_key_value_heads=2)
    together = evidence_of(model, [0, 1, 2])
    for text in range(3):
        for layer, alone in evidence_of(model, [text], crop=True).items():
            for name in ("copy_wins", "copy_pairs", "copy_rows"):
                assert alone.column(name)[0, :-1].tolist() == together[layer].column(name)[text, :-1].tolist()


def test_a_constant_output_wins_exactly_half():
    model = model_of("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "v_proj" in name:
                parameter.zero_()
    for layer in model.model.layers:
        layer.self_attn.v_proj.bias = torch.nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
    for evidence in evidence_of(model, [0, 1, 2]).values():
        wins, pairs = (evidence.column(name)[:, :-1].sum(0) for name in ("copy_wins", "copy_pairs"))
        torch.testing.assert_close(wins, pairs / 2, rtol=1e-3, atol=0.5)  # rounding of weights that sum to one
        assert pairs.min() > 0


def test_a_path_through_another_norm_is_not_direct():
    found = path_of(model_of("gemma2", num_key_value_heads=3, head_dim=8))
    assert found is not None
    assert not found.outputs  # a norm after the attention
    assert path_of(model_of("bert", is_decoder=True)) is None  # the head of BERT has layers of its own
    llama = path_of(model_of("llama"))
    assert llama is not None
    assert len(llama.outputs) == LAYERS
    assert not llama.centred
    assert path_of(model_of("gpt2")).centred


def test_evidence_of_an_earlier_version_has_no_copy_score():
    """Nor shares of today: it ended with mass and rows inside the word and the sentence, with the token itself."""
    evidence = evidence_of(model_of("llama"), [0, 1])[0]
    saved = evidence.state()
    first = COLUMNS.index("word_mass")
    saved["sums"] = saved["sums"][..., : first + 4]
    loaded = evidence.with_state(saved).merge(evidence)
    assert loaded.column("copy_pairs").isnan().all()
    assert loaded.sums[..., first:].isnan().all()
    torch.testing.assert_close(loaded.sums[..., :first], 2 * evidence.sums[..., :first])
