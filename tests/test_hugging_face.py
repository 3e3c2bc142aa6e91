"""Models of Hugging Face, built small and at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from promises import Network, Promises
from torch import Tensor, nn

import eigendamage as ed

IMAGES = {"image_size": 32, "num_labels": 5}
WORDS: dict[str, Any] = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


def words() -> dict[str, Tensor]:
    ids = torch.randint(2, 60, (4, 7), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def resnet(kind: str) -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 2]}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, layer_type=kind, num_labels=5))


def convnext() -> nn.Module:
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 2, 1], **IMAGES))


def mobilenet() -> nn.Module:
    # Its code asks its convolutions for their stride and kernel, to pad as TensorFlow does.
    sizes = {"depth_multiplier": 0.1, "depth_divisible_by": 4, "min_depth": 4}
    return hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(**sizes, **IMAGES, tf_padding=True))


def vit() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "patch_size": 8}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **IMAGES))


def swin() -> nn.Module:
    sizes = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4}
    return hf.SwinForImageClassification(hf.SwinConfig(**sizes, **IMAGES))


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return hf.BertForSequenceClassification(hf.BertConfig(**sizes, **WORDS, num_labels=5))


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **WORDS))


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, intermediate_size=24, **WORDS))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **WORDS, decoder_start_token_id=0))


def settled(build: Callable[[], nn.Module]) -> nn.Module:
    """As after training: no weight so small, and no norm so plain, that a mistake would not show."""
    model = build()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            if tensor.dim() > 1:
                tensor.normal_(std=tensor[0].numel() ** -0.5)
            elif name.endswith(("norm.weight", "normalization.weight", "running_var")):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "running_mean")):
                tensor.normal_(std=0.1)
    return model


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).logits


BUILDERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "resnet-basic": (lambda: resnet("basic"), images()),
    "resnet-bottleneck": (lambda: resnet("bottleneck"), images()),
    "convnext": (convnext, images()),
    "mobilenet": (mobilenet, images()),
    "vit": (vit, images()),
    "swin": (swin, images()),
    "bert": (bert, words()),
    "gpt2": (gpt2, words()),
    "llama": (llama, words()),
    "t5": (t5, words() | {"decoder_input_ids": words()["input_ids"]}),
}
NETWORKS = {
    name: Network(lambda build=build: settled(build), batch, logits)  # type: ignore[misc]
    for name, (build, batch) in BUILDERS.items()
}

SHARED = "its weight is shared with another module"
READ = "the model's code does more with it than call it in its place"

# What cannot become a bottleneck, and nothing else may stay dense.
DENSE = {
    "vit": {"vit.embeddings.patch_embeddings.projection": READ},  # its dtype is read
    "gpt2": {"lm_head": SHARED},
    "t5": {
        "lm_head": SHARED,
        "encoder.block.0.layer.1.DenseReluDense.wo": READ,  # its dtype is read
        "encoder.block.1.layer.1.DenseReluDense.wo": READ,
        "decoder.block.0.layer.2.DenseReluDense.wo": READ,
        "decoder.block.1.layer.2.DenseReluDense.wo": READ,
    },
}


@pytest.fixture(params=NETWORKS, scope="module")
def network(request: pytest.FixtureRequest) -> Network:
    return NETWORKS[request.param]


class TestHuggingFace(Promises):
    pass


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_becomes_a_bottleneck_but_for_a_good_reason(name: str) -> None:
    layers = NETWORKS[name].plan("eigendamage", 0.0).layers
    dense = {layer: choice.reason for layer, choice in layers.items() if choice.structure == "dense"}
    assert {layer: reason for layer, reason in dense.items() if "grouped" not in reason} == DENSE.get(name, {})


@pytest.mark.parametrize("name", NETWORKS)
def test_every_model_has_channels_to_lose(name: str) -> None:
    assert NETWORKS[name].plan("kron-obd", 0.5).kept


@pytest.mark.parametrize("name", ["resnet-basic", "swin", "bert", "gpt2"])
def test_pairs_are_measured_through_the_logits(name: str) -> None:
    network = NETWORKS[name]
    inputs = next(iter(network.batch.values()))
    by_pairs = ed.measure(network.model, [(inputs, None)], methods=["eigendamage"], progress=False)
    for layer, expected in network.curvature.measured.items():
        torch.testing.assert_close(by_pairs[layer].channel_form, expected.channel_form)
        torch.testing.assert_close(by_pairs[layer].gradients, expected.gradients)


@pytest.mark.parametrize("method", ["eigendamage", "kron-obd"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_pruned_language_model_generates(name: str, method: str) -> None:
    half = NETWORKS[name].pruned(method, 0.5)
    generated = half.generate(**words(), max_new_tokens=3, do_sample=False)
    assert generated.shape[0] == 4
