"""torch.nn.MultiheadAttention and modules built from it: the weights read from a state dict attend like the module."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from qkov.circuits import AttentionWeights, QkovError, measure, open_checkpoint
from torch import Tensor, nn
from torch.nn import functional

from .forward_pass import attend

WIDTH, HEADS, LENGTH = 48, 4, 10
TOLERANCE = 1e-9


def module(made: nn.Module) -> Any:
    """Give every parameter, biases included, values of ordinary size in float64."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made.double().eval()


def stream(length: int = LENGTH, width: int = WIDTH, seed: int = 9) -> Tensor:
    return torch.randn(length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def read(made: nn.Module, folder, heads: int | None = HEADS) -> list[AttentionWeights]:
    torch.save(made.state_dict(), folder / "model.pt")
    return list(open_checkpoint(folder / "model.pt", heads=heads).layers())


def assert_attends(
    weights: AttentionWeights,
    attention: nn.Module,
    x: Tensor,
    source: Tensor | None = None,
    values: Tensor | None = None,
):
    keys = x if source is None else source
    read = keys if values is None else values
    with torch.no_grad():
        output, pattern = attention(x[None], keys[None], read[None], need_weights=True, average_attn_weights=False)
    attended = attend(weights, x, source=source, values=values)
    torch.testing.assert_close(attended.pattern, pattern[0], rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(attended.output, output[0], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("bias", [True, False])
def test_one_module(bias, tmp_path):
    attention = module(nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True))
    (weights,) = read(attention, tmp_path)
    assert_attends(weights, attention, stream())
    assert {"causal", "norm"} <= weights.facts.unknown
    with pytest.raises(QkovError, match=r"nothing states its number of heads: give --heads"):
        read(attention, tmp_path, heads=None)


@pytest.mark.parametrize(("kdim", "vdim"), [(20, 20), (20, 28), (WIDTH, 28), (20, WIDTH)])
def test_keys_and_values_of_other_widths(kdim, vdim, tmp_path):
    attention = module(nn.MultiheadAttention(WIDTH, HEADS, kdim=kdim, vdim=vdim, batch_first=True))
    (weights,) = read(attention, tmp_path)
    assert weights.W_K is not None
    assert weights.W_V is not None
    assert tuple(weights.W_K.shape) == (HEADS, kdim, WIDTH // HEADS)
    assert tuple(weights.W_V.shape) == (HEADS, vdim, WIDTH // HEADS)
    assert_attends(weights, attention, stream(), source=stream(7, kdim), values=stream(7, vdim, seed=10))


def test_circuits_between_other_widths_are_measured(tmp_path):
    attention = module(nn.MultiheadAttention(WIDTH, HEADS, kdim=20, vdim=28))
    (weights,) = read(attention, tmp_path)
    W_Q, W_K, W_V = (
        getattr(attention, f"{side}_proj_weight").detach().unflatten(0, (HEADS, -1)) for side in ("q", "k", "v")
    )
    W_O = attention.out_proj.weight.detach().unflatten(1, (HEADS, -1)).movedim(1, 0)
    for circuit, dense in ((weights.qk(), W_K.mT @ W_Q), (weights.ov(), W_O @ W_V)):
        assert circuit.shape == dense.shape
        figures = measure(circuit)
        s = torch.linalg.svdvals(dense)[:, : WIDTH // HEADS]
        torch.testing.assert_close(figures["singular_values"], s, rtol=TOLERANCE, atol=TOLERANCE)
        rates = sum(1 / size for size in dense.shape[1:]) * s.sum(-1)
        torch.testing.assert_close(figures["omega_mean"], rates, rtol=TOLERANCE, atol=TOLERANCE)
        # A matrix that is not square has no symmetric part and no eigenvalues.
        for name in ("symmetric_share", "antisymmetric_share", "copying_score", "positive_eigenvalue_share"):
            assert figures[name].isnan().all()


def test_a_key_that_every_query_sees_is_named_as_not_read(tmp_path):
    attention = module(nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True))
    torch.save({f"layers.0.self_attn.{name}": t for name, t in attention.state_dict().items()}, tmp_path / "model.pt")
    checkpoint = open_checkpoint(tmp_path / "model.pt", heads=HEADS)
    (reason,) = (why for what, why in checkpoint.skipped.items() if "add_bias_kv" in what)
    assert "belong to no token" in reason


@pytest.mark.parametrize("under", ["", "transformer_encoder", "model.net"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_under_any_name(norm_first, under, tmp_path):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, norm_first=norm_first, batch_first=True)
    encoder = module(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    holder = nn.Module()
    place: Any = holder
    for name in under.split(".") if under else ():
        place.add_module(name, nn.Module())
        place = place.get_submodule(name)
    place.add_module("layers", encoder.layers)
    found = read(holder, tmp_path)
    assert [(weights.stack, weights.layer) for weights in found] == [("", 0), ("", 1)]
    for weights, of_layer in zip(found, encoder.layers, strict=True):
        assert_attends(weights, of_layer.self_attn, stream())
        # The names do not tell whether the norm stands in front.
        assert "norm" in weights.facts.unknown


def test_encoder_and_decoder_and_what_crosses_between_them(tmp_path):
    transformer = module(nn.Transformer(WIDTH, HEADS, 2, 1, 64, batch_first=True))
    found = {(weights.stack, weights.layer): weights for weights in read(transformer, tmp_path)}
    assert list(found) == [("encoder", 0), ("encoder", 1), ("decoder", 0), ("decoder cross", 0)]
    assert_attends(found["encoder", 1], transformer.encoder.layers[1].self_attn, stream())
    assert_attends(found["decoder", 0], transformer.decoder.layers[0].self_attn, stream())
    cross = found["decoder cross", 0]
    assert cross.facts.cross
    assert_attends(cross, transformer.decoder.layers[0].multihead_attn, stream(), source=stream(7))


def test_a_decoder_by_itself(tmp_path):
    decoder = module(nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 64, batch_first=True), 2))
    found = read(decoder, tmp_path)
    assert [(weights.stack, weights.layer) for weights in found] == [("", 0), ("", 1), ("cross", 0), ("cross", 1)]
    assert_attends(found[3], decoder.layers[1].multihead_attn, stream(), source=stream(7))


def test_two_towers_of_openai_s_clip(tmp_path):
    text, image = (
        nn.ModuleList(nn.ModuleDict({"ln_1": nn.LayerNorm(WIDTH), "attn": attention()}) for _ in range(2))
        for attention in (lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),) * 2
    )
    holder = nn.ModuleDict({"transformer": nn.ModuleDict({"resblocks": text})})
    holder["visual"] = nn.ModuleDict({"transformer": nn.ModuleDict({"resblocks": image})})
    module(holder)
    found = {(weights.stack, weights.layer): weights for weights in read(holder, tmp_path)}
    assert list(found) == [("text", 0), ("text", 1), ("vision", 0), ("vision", 1)]
    for stack, tower in (("text", text), ("vision", image)):
        block: Any = tower[1]
        normed = block["ln_1"](stream()).detach()
        assert_attends(replace(found[stack, 1], norm=None), block["attn"], normed)
        output, _ = block["attn"](normed[None], normed[None], normed[None])
        torch.testing.assert_close(attend(found[stack, 1], stream()).output, output[0].detach(), rtol=1e-9, atol=1e-9)


def test_a_vision_transformer_of_timm_s_names(tmp_path):
    qkv, proj, norm = (
        module(each) for each in (nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    )
    parts = {"attn.qkv": qkv, "attn.proj": proj, "norm1": norm}
    state = {f"blocks.0.{at}.{name}": t for at, part in parts.items() for name, t in part.state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    (weights,) = open_checkpoint(tmp_path / "model.pt", heads=HEADS).layers()
    with torch.no_grad():
        # Queries, keys and values lie one after another, each of all heads.
        q, k, v = qkv(norm(stream())).reshape(LENGTH, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3).unbind(0)
        expected = proj(functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(LENGTH, WIDTH))
    # The file does not tell eps; torch's own is what this norm has.
    assert weights.norm is not None
    weights = replace(weights, norm=replace(weights.norm, eps=1e-5))
    torch.testing.assert_close(attend(weights, stream()).output, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_two_attentions_of_one_layer_that_nothing_tells_apart(tmp_path):
    layers = nn.ModuleList(
        nn.ModuleDict({name: nn.MultiheadAttention(WIDTH, HEADS) for name in ("attn", "self_attn")}) for _ in range(2)
    )
    found = read(nn.ModuleDict({"layers": layers}), tmp_path)
    assert [(weights.stack, weights.layer) for weights in found] == [("", 0), ("", 1), ("attn", 0), ("attn", 1)]


def test_the_same_names_under_two_prefixes_ask_for_one(tmp_path):
    layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 64) for _ in range(2)]
    both = nn.ModuleDict({name: nn.ModuleDict({"layers": nn.ModuleList(layers)}) for name in ("left", "right")})
    with pytest.raises(
        QkovError, match=r"under several prefixes, 'left.layers', 'right.layers': choose one with --prefix"
    ):
        read(both, tmp_path)
    found = open_checkpoint(tmp_path / "model.pt", heads=HEADS, prefix="right.layers")
    assert found.layer_keys == [("", 0), ("", 1)]
