"""Small models with random weights from the configurations of transformers and timm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from fp4compile.bench.models import GPT

VOCABULARY, CONTEXT = 96, 24
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2}
MAMBA = {"n_groups": 2, "chunk_size": 8}


class Task(NamedTuple):
    """A model, the keyword arguments of one step, and the loss of what it returns."""

    model: nn.Module
    inputs: dict[str, Any]
    loss: Callable[[Any], Tensor]


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, CONTEXT))


def _images() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def _own_loss(output: Any) -> Tensor:
    return output.loss


def _hidden_loss(output: Any) -> Tensor:
    # not a square: the mean square of a norm's output is a constant, its gradient rounding noise.
    return output.last_hidden_state.float().sin().mean()


def _classes(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), torch.arange(len(logits)))


def language(model: str, config: str, **keys: Any) -> Task:
    """A language model with a head."""
    made = getattr(hf, model)(getattr(hf, config)(**{**SIZES, **SPECIAL, **keys}))
    # Looking the loss up by the model's name warns, which breaks the graph.
    made.loss_type = "ForMaskedLM" if "Masked" in model else "ForCausalLM"
    x = _tokens()
    cache = {} if "Masked" in model else {"use_cache": False}
    return Task(made, {"input_ids": x, "labels": x.clone(), **cache}, _own_loss)


def gpt2() -> Task:
    """Conv1D, hand-written GELU, dropout around the MLP."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    return language("GPT2LMHeadModel", "GPT2Config", **sizes)


def t5(feed_forward: str, dropout: float = 0.1) -> Task:
    """Encoder and decoder; dropout between the MLP's linears."""
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        feed_forward_proj=feed_forward, dropout_rate=dropout, decoder_start_token_id=0,
    )  # fmt: skip
    inputs = {"input_ids": _tokens(), "labels": _tokens(), "use_cache": False}
    return Task(hf.T5ForConditionalGeneration(config), inputs, _own_loss)


def xlnet() -> Task:
    """Attention by einsum, with an axis for heads in the weights."""
    config = hf.XLNetConfig(vocab_size=VOCABULARY, d_model=64, n_layer=2, n_head=4, d_inner=128)
    return Task(hf.XLNetModel(config), {"input_ids": _tokens()}, _hidden_loss)


def vit() -> Task:
    """The vision transformer of transformers."""
    config = hf.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=10)
    inputs = {"pixel_values": _images(), "labels": torch.arange(2)}
    return Task(hf.ViTForImageClassification(config), inputs, _own_loss)


def clip() -> Task:
    """CLIP's text encoder: QuickGELU."""
    config = hf.CLIPTextConfig(**SIZES, **SPECIAL, max_position_embeddings=CONTEXT)
    return Task(hf.CLIPTextModel(config), {"input_ids": _tokens()}, _hidden_loss)


def whisper() -> Task:
    """Whisper's encoder."""
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = hf.WhisperConfig(
        d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128,
        num_mel_bins=16, max_source_positions=CONTEXT, **SPECIAL,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(2, 16, 2 * CONTEXT)}
    return Task(WhisperEncoder(config), inputs, _hidden_loss)


def mamba2() -> Task:
    """State spaces only: projections in and out, no MLP."""
    keys = {"state_size": 16, "num_heads": 8, "head_dim": 16, **MAMBA}
    return language("Mamba2ForCausalLM", "Mamba2Config", **keys)


def nemotron_h() -> Task:
    """State spaces, attention and ReLU² MLPs, a layer each."""
    keys = {
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "num_hidden_layers": 4,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "head_dim": 16,
        **GROUPED, **MAMBA,
    }  # fmt: skip
    return language("NemotronHForCausalLM", "NemotronHConfig", **keys)


def image(name: str, **keys: Any) -> Task:
    """A classifier of timm."""
    model = timm.create_model(name, pretrained=False, num_classes=10, **keys)
    return Task(model, {"x": _images()}, _classes)


def nano_gpt() -> Task:
    """This project's own GPT in nanoGPT style, with one qkv projection."""
    x = _tokens()
    model = GPT(d=64, layers=2, heads=4, context=CONTEXT, vocabulary=VOCABULARY)
    return Task(model, {"tokens": x, "targets": x.roll(-1, 1)}, lambda loss: loss)


HEADS = {**GROUPED, "head_dim": 16}
MODELS: dict[str, Callable[[], Task]] = {
    "GPT-2": gpt2,
    "GPT in nanoGPT style": nano_gpt,
    "Llama": partial(language, "LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "Qwen3": partial(language, "Qwen3ForCausalLM", "Qwen3Config", **HEADS),
    "Gemma 2": partial(language, "Gemma2ForCausalLM", "Gemma2Config", **HEADS),
    "Phi-3": partial(language, "Phi3ForCausalLM", "Phi3Config", **GROUPED),
    "BLOOM": partial(language, "BloomForCausalLM", "BloomConfig", n_layer=2, n_head=4),
    "BERT": partial(language, "BertForMaskedLM", "BertConfig"),
    "XLNet": xlnet,
    "T5": partial(t5, "relu"),
    "T5, no dropout": partial(t5, "relu", 0.0),
    "T5 1.1": partial(t5, "gated-gelu"),
    "T5 1.1, no dropout": partial(t5, "gated-gelu", 0.0),
    "ViT": vit,
    "CLIP, text": clip,
    "Whisper, encoder": whisper,
    "Mamba-2": mamba2,
    "Nemotron-H": nemotron_h,
    "Mixtral": partial(
        language, "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **GROUPED
    ),
    "ViT (timm)": partial(
        image, "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4
    ),
    "ConvNeXt (timm)": partial(
        image, "convnext_tiny", depths=(1, 1, 1, 1), dims=(16, 32, 64, 64)
    ),
    "Swin (timm)": partial(
        image, "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=32,
        depths=(2, 2), num_heads=(2, 4),
    ),
}  # fmt: skip
