"""The content of a layer: a hash that knows the values and nothing else, and a sketch against dense distances."""

import numpy as np
import pytest
import torch
from qkov.circuits import AttentionWeights, open_checkpoint, open_model
from qkov.circuits.weights.content import SKETCH_SIZE, ContentRecorder, layer_content
from safetensors.torch import save_file

#: The first signs of W_Q. Stores that were written with other signs could not be compared with new ones.
SIGNS = (1.0, 1.0, -1.0)


def weights(seed: int = 0, heads: int = 4, d_model: int = 64, d_head: int = 16, **more) -> AttentionWeights:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(heads, d_model, d_head, generator=generator) for name in ("W_Q", "W_K", "W_V")}
    return AttentionWeights(0, **drawn, W_O=torch.randn(heads, d_head, d_model, generator=generator), **more)


def converted(layer: AttentionWeights, dtype: torch.dtype) -> AttentionWeights:
    tensors = {name: getattr(layer, name).to(dtype, copy=True) for name in ("W_Q", "W_K", "W_V", "W_O")}
    return AttentionWeights(layer.layer, **tensors)


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"Q": (4, 64, 16), "K": (4, 64, 16), "V": (4, 64, 16), "O": (4, 16, 64)}
    return {
        f"blocks.{layer}.attn.W_{name}": torch.randn(*shape, generator=generator)
        for layer in range(2)
        for name, shape in shapes.items()
    }


def digests(address) -> list[str]:
    return [layer_content(layer).digest for layer in open_checkpoint(address).layers()]


def test_the_format_and_the_names_around_the_weights_do_not_matter(tmp_path):
    tensors = state()
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "b.pt")
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in tensors.items()}}, tmp_path / "c.pt")
    torch.save({name: tensor.double() for name, tensor in tensors.items()}, tmp_path / "d.pt")
    expected = digests(tmp_path / "a.safetensors")
    assert len(set(expected)) == 2
    for other in ("b.pt", "c.pt", "d.pt"):
        assert digests(tmp_path / other) == expected
    save_file(state(1), tmp_path / "e.safetensors")
    assert not set(digests(tmp_path / "e.safetensors")) & set(expected)


def test_a_layout_that_is_rearranged_holds_the_same_weights(tmp_path):
    tensors = state()
    save_file(tensors, tmp_path / "per_head.safetensors")
    linear = {}
    for name, tensor in tensors.items():
        # torch's Linear stores [out, in]: the heads are its rows, or its columns for W_O.
        rows = tensor.flatten(0, 1).mT if name.endswith("W_O") else tensor.mT.flatten(0, 1)
        linear[name] = rows.contiguous()
    save_file(linear, tmp_path / "linear.safetensors")
    (tmp_path / "map.toml").write_text(
        'layout = "linear"\nheads = 4\n[tensors]\n'
        + "".join(f'{name} = "blocks.{{layer}}.attn.W_{name}"\n' for name in "QKVO")
    )
    from qkov.circuits import read_mapping

    mapped = open_checkpoint(tmp_path / "linear.safetensors", read_mapping(tmp_path / "map.toml"))
    assert [layer_content(layer).digest for layer in mapped.layers()] == digests(tmp_path / "per_head.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_floating_type_does_not_matter_but_rounding_does(dtype):
    layer = weights()
    short = converted(layer, dtype)
    assert layer_content(short).digest == layer_content(converted(short, torch.float32)).digest
    assert layer_content(short).digest == layer_content(converted(short, torch.float64)).digest
    assert layer_content(short).digest != layer_content(layer).digest


def test_float64_that_float32_does_not_hold_is_not_rounded():
    layer = converted(weights(), torch.float64)
    nudged = converted(layer, torch.float64)
    nudged.W_O[3, 0, 0] = np.nextafter(float(nudged.W_O[3, 0, 0]), 9.0)
    assert layer_content(nudged).digest != layer_content(layer).digest


@pytest.mark.parametrize("name", ["W_Q", "W_K", "W_V", "W_O", "b_Q", "b_O"])
def test_one_bit_of_any_tensor_changes_the_hash(name):
    def biased() -> AttentionWeights:
        return weights(b_Q=torch.zeros(4, 16), b_O=torch.zeros(64))

    changed = biased()
    flat = getattr(changed, name).view(-1)
    flat[-1] = float(np.nextafter(np.float32(flat[-1]), np.float32(9)))
    assert layer_content(changed).digest != layer_content(biased()).digest


def test_the_same_numbers_in_other_places_are_another_content():
    layer = weights()
    swapped = AttentionWeights(0, W_Q=layer.W_K, W_K=layer.W_Q, W_V=layer.W_V, W_O=layer.W_O)
    assert layer_content(swapped).digest != layer_content(layer).digest


def test_nan_and_infinity_are_content_as_well():
    layer = weights()
    layer.W_Q[0, 0, 0], layer.W_Q[0, 0, 1] = torch.nan, torch.inf
    content = layer_content(layer)
    assert content.digest == layer_content(converted(layer, torch.float64)).digest
    assert content.sketch.isnan().any()


def test_a_live_model_and_its_file_have_the_same_content(tmp_path):
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
        )
    )
    model.save_pretrained(tmp_path)
    live = [layer_content(layer).digest for layer in open_model(model).layers()]
    assert live == digests(tmp_path)


@pytest.mark.parametrize(
    "shape", [{}, {"heads": 1, "d_model": 8, "d_head": 3}, {"heads": 2, "d_model": 1030, "d_head": 1031}]
)
def test_distances_follow_from_sketches(shape):
    # 60 pairs: the mean of the squared ratio is 1 up to a standard error of (2 / 251 / 60)^(1/2), below 1.2 %.
    ratios = []
    for seed in range(60 if shape.get("d_model") != 1030 else 3):
        one, two = weights(2 * seed, **shape), weights(2 * seed + 1, **shape)
        dense = sum(
            float((getattr(one, name).double() - getattr(two, name).double()).square().sum())
            for name in ("W_Q", "W_K", "W_V", "W_O")
        )
        ratios.append(float((layer_content(one).sketch - layer_content(two).sketch).square().sum()) / dense)
    assert np.mean(ratios) == pytest.approx(1, abs=4 * (2 / SKETCH_SIZE / len(ratios)) ** 0.5)
    # With 251 weights or fewer nothing is projected away.
    assert np.abs(np.array(ratios) - 1).max() < (0.5 if shape.get("d_model") != 8 else 1e-12)


@pytest.mark.parametrize("d_head", [64, 128, 251])
def test_a_difference_of_rank_one_in_a_few_columns_is_estimated_as_well(d_head):
    # The entries of one column of W_Q stand d_head apart in memory.
    ratios = []
    for seed in range(20):
        one = weights(0, heads=2, d_model=512, d_head=d_head)
        two = converted(one, torch.float32)
        change = torch.randn(512, generator=torch.Generator().manual_seed(seed))
        two.W_Q[1, :, 5] += change
        sketched = (layer_content(one).sketch - layer_content(two).sketch).square().sum()
        ratios.append(float(sketched / change.double().square().sum()))
    assert np.mean(ratios) == pytest.approx(1, abs=0.35 if d_head == 251 else 0.2)


def plain_sketch(layer: AttentionWeights, names=("W_Q", "W_K", "W_V", "W_O")) -> np.ndarray:
    """Entry n of a tensor's matrix times sign n, and times one more sign for every 1024 * 251 of them, in 251 groups.

    Each matrix goes on in the group that comes after the last one's.
    """
    period = 1024 * 251
    words = np.random.PCG64(251).random_raw(period // 64)
    # The bits of a word from its lowest byte on, and from the highest bit of each byte on.
    signs = np.array(
        [[(int(word) >> (8 * byte + bit)) & 1 for byte in range(8) for bit in range(7, -1, -1)] for word in words]
    )
    signs = 2.0 * signs.flatten() - 1
    total, before = np.zeros(251), 0
    for position, name in enumerate(names):
        stream = np.random.PCG64([251, position])
        for matrix in getattr(layer, name).double().numpy():
            values = matrix.flatten()
            numbers = np.arange(len(values))
            more = np.array([1.0 if stream.random_raw() % 2 else -1.0 for _ in range(0, len(values), period)])
            signed = values * signs[numbers % period] * more[numbers // period]
            np.add.at(total, (numbers + before) % 251, signed)
            before += len(values)
    return total


@pytest.mark.parametrize("shape", [{}, {"heads": 2, "d_model": 1030, "d_head": 700}])
def test_a_sketch_is_that_of_its_formula(shape):
    """Stores hold sketches, so later versions have to compute the same ones."""
    layer = weights(**shape)
    np.testing.assert_allclose(layer_content(layer).sketch, plain_sketch(layer), rtol=1e-9, atol=1e-9)


def test_biases_are_in_the_hash_and_not_in_the_sketch():
    plain, biased = layer_content(weights()), layer_content(weights(b_Q=torch.ones(4, 16)))
    assert torch.equal(plain.sketch, biased.sketch)
    assert plain.digest != biased.digest
    assert plain.shapes == biased.shapes == "W_Q 4 x 64 x 16, W_K 4 x 64 x 16, W_V 4 x 64 x 16, W_O 4 x 16 x 64"


def test_a_small_difference_keeps_its_digits():
    one = converted(weights(), torch.float64)
    two = converted(one, torch.float64)
    two.W_V[0, 0, 0] += 1e-9
    distance = float((layer_content(one).sketch - layer_content(two).sketch).square().sum().sqrt())
    assert distance == pytest.approx(1e-9, rel=1e-3)


def test_the_signs_are_the_same_on_every_machine():
    layer = AttentionWeights(0, W_Q=torch.ones(1, 3, 1), W_K=torch.zeros(1, 3, 1))
    sketch = layer_content(layer).sketch
    assert sketch[:3].tolist() == [SIGNS[0], SIGNS[1], SIGNS[2]]
    assert not sketch[3:].any()


def test_a_recorder_yields_the_layers_themselves_and_notes_each_once(tmp_path):
    save_file(state(), tmp_path / "a.safetensors")
    source = open_checkpoint(tmp_path / "a.safetensors")
    recorder = ContentRecorder(source)
    assert recorder.layer_keys == source.layer_keys
    assert recorder.contents == {}
    read = list(recorder.layers())
    assert [layer.layer for layer in read] == [0, 1]
    assert [recorder.contents["", number].digest for number in (0, 1)] == digests(tmp_path / "a.safetensors")
