# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, each with its own kind of batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = 96
WIDTH = 64


def _random(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def tokens(step: int, length: int = 12, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, vocabulary, (2, length), generator=_random(step))


@dataclass(frozen=True)
class Specimen:
    """A model and its loss."""

    make: Callable[[], torch.nn.Module]
    loss: Callable[[torch.nn.Module, int], torch.Tensor]


def _language_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    batch = tokens(step)
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def language(model: str, config: str, **values: Any) -> Specimen:
    """A causal language model of transformers, by the names of its classes."""

    def make() -> torch.nn.Module:
        import transformers

        made = getattr(transformers, config)(
            **{"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
               **values})
        return getattr(transformers, model)(made).train()

    return Specimen(make, _language_loss)


LLAMA_LIKE = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
              "head_dim": 16}
NEOX_LIKE = {"hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 4,
             "num_attention_heads": 4, "max_position_embeddings": 64}

MOE_LIKE = {**LLAMA_LIKE, "num_hidden_layers": 8, "intermediate_size": 32,
            "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
BERT_LIKE = {**NEOX_LIKE, "type_vocab_size": 2}


def masked(model: str, config: str, **values: Any) -> Specimen:
    """A model that fills gaps in its own tokens."""
    return language(model, config, **BERT_LIKE, **values)


def translator(model: str, config: str, **values: Any) -> Specimen:
    """An encoder and a decoder of tokens."""

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        value: torch.Tensor = model(input_ids=tokens(step), labels=tokens(step + 50, 8)).loss
        return value

    return Specimen(language(model, config, decoder_start_token_id=1, **values).make, loss)


def _vit() -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(
        image_size=32, patch_size=8, num_labels=10, **NEOX_LIKE)).train()


def _vit_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    images = torch.randn(2, 3, 32, 32, generator=_random(step))
    loss: torch.Tensor = model(pixel_values=images, labels=torch.tensor([1, 4])).loss
    return loss


def _clip() -> torch.nn.Module:
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(CLIPConfig(
        text_config={"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2,
                     **NEOX_LIKE},
        vision_config={"image_size": 32, "patch_size": 8, **NEOX_LIKE},
        projection_dim=32)).train()


def _clip_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    images = torch.randn(2, 3, 32, 32, generator=_random(step))
    loss: torch.Tensor = model(input_ids=tokens(step), pixel_values=images, return_loss=True).loss
    return loss


def _whisper() -> torch.nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=16, d_model=WIDTH, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, max_source_positions=32, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None)).train()


def _whisper_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    sound = torch.randn(2, 16, 64, generator=_random(step))
    loss: torch.Tensor = model(input_features=sound, labels=tokens(step, 8)).loss
    return loss


class Convolutions(torch.nn.Module):
    """As torchvision's residual nets are: convolutions, batch norms, a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        width = 32
        self.stem = torch.nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Conv2d(width, width, 3, padding=1, bias=False),
                torch.nn.BatchNorm2d(width), torch.nn.ReLU(inplace=True),
                torch.nn.Conv2d(width, width, 3, padding=1, groups=4, bias=False),
                torch.nn.BatchNorm2d(width))
            for _ in range(8))
        self.head = torch.nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


def _image_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    images = torch.randn(4, 3, 16, 16, generator=_random(step))
    return torch.nn.functional.cross_entropy(model(images), torch.tensor([1, 4, 0, 9]))


class Recurrent(torch.nn.Module):
    """An LSTM over letters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(VOCABULARY, 48)
        self.layers = torch.nn.LSTM(48, 48, num_layers=4, batch_first=True, dropout=0.1)
        self.more = torch.nn.ModuleList(torch.nn.LSTM(48, 48, batch_first=True) for _ in range(20))
        self.head = torch.nn.Linear(48, VOCABULARY)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x, _ = self.layers(self.letters(batch))
        for layer in self.more:
            x, _ = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def _letter_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    batch = tokens(step)
    return torch.nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])


class Borrowing(torch.nn.Module):
    """Its forward reads parameters of modules that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(10))
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, other in zip(self.layers, reversed(self.layers), strict=True):
            assert isinstance(layer, torch.nn.Linear) and isinstance(other, torch.nn.Linear)
            x = torch.tanh(layer(x) + x @ other.weight.t()[:, :] * self.scale + other.bias)
        return x


class Branching(torch.nn.Module):
    """Which layers run depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(6):
            side = int(x.sum() > 0)
            x = torch.tanh(self.layers[2 * number + side](x)) + x
        return x


def _vector_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=_random(step))
    loss: torch.Tensor = (model(x) - x.roll(1, 1)).square().mean()
    return loss


def _checkpointed(reentrant: bool) -> Specimen:
    def make() -> torch.nn.Module:
        model = ZOO["llama"].make()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        if reentrant:
            model.enable_input_require_grads()  # type: ignore[operator]
        return model

    return Specimen(make, _language_loss)


def _in_bf16() -> torch.nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return ZOO["llama"].make()
    finally:
        torch.set_default_dtype(torch.float32)


def _generating() -> Specimen:
    """Writes something between training steps."""

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        model.eval()
        written = model.generate(tokens(step + 9, 4), max_new_tokens=5,  # type: ignore[operator]
                                 do_sample=True, pad_token_id=0)
        model.train()
        batch = torch.cat([tokens(step), written.repeat(1, 2)[:, :12]])
        value: torch.Tensor = model(input_ids=batch, labels=batch).loss
        return value

    return Specimen(language("GPT2LMHeadModel", "GPT2Config", **GPT2).make, loss)


def _adapted() -> Specimen:
    """A frozen base with LoRA adapters, which are trained."""

    def make() -> torch.nn.Module:
        import peft

        base = ZOO["llama"].make()
        made: torch.nn.Module = peft.get_peft_model(base, peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05,
            task_type="CAUSAL_LM"))
        return made.train()

    return Specimen(make, _language_loss)


GPT2 = {"n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": 64}

ZOO = {
    "gpt2": language("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "gpt_neox": language("GPTNeoXForCausalLM", "GPTNeoXConfig", **NEOX_LIKE),
    "opt": language("OPTForCausalLM", "OPTConfig", hidden_size=WIDTH, ffn_dim=256,
                    num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64,
                    word_embed_proj_dim=WIDTH),
    "bloom": language("BloomForCausalLM", "BloomConfig", hidden_size=WIDTH, n_layer=4, n_head=4),
    "llama": language("LlamaForCausalLM", "LlamaConfig", **LLAMA_LIKE),
    "llama_bf16": Specimen(_in_bf16, _language_loss),
    "mistral": language("MistralForCausalLM", "MistralConfig", sliding_window=8, **LLAMA_LIKE),
    "qwen2": language("Qwen2ForCausalLM", "Qwen2Config", **LLAMA_LIKE),
    "qwen3_tied": language("Qwen3ForCausalLM", "Qwen3Config", tie_word_embeddings=True,
                           **LLAMA_LIKE),
    "gemma2": language("Gemma2ForCausalLM", "Gemma2Config", query_pre_attn_scalar=16,
                       sliding_window=8, **LLAMA_LIKE),
    "gemma3": language("Gemma3ForCausalLM", "Gemma3TextConfig", query_pre_attn_scalar=16,
                       sliding_window=8, **LLAMA_LIKE),
    "phi3": language("Phi3ForCausalLM", "Phi3Config",
                     **{**LLAMA_LIKE, "num_key_value_heads": 4, "num_hidden_layers": 6}),
    "mixtral": language("MixtralForCausalLM", "MixtralConfig",
                        **{**LLAMA_LIKE, "num_hidden_layers": 8, "intermediate_size": 32},
                        num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": language("Qwen2MoeForCausalLM", "Qwen2MoeConfig",
                          shared_expert_intermediate_size=32, **MOE_LIKE),
    "deepseek_v3": language(
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        **{key: value for key, value in MOE_LIKE.items() if key not in
           ("num_experts", "head_dim", "num_key_value_heads")},
        n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=32,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        num_key_value_heads=4),
    "falcon": language("FalconForCausalLM", "FalconConfig", hidden_size=WIDTH,
                       num_hidden_layers=4, num_attention_heads=4, alibi=False,
                       max_position_embeddings=64),
    "mpt": language("MptForCausalLM", "MptConfig", d_model=WIDTH, n_layers=4, n_heads=4,
                    max_seq_len=64),
    "mamba": language("MambaForCausalLM", "MambaConfig", hidden_size=WIDTH, state_size=8,
                      num_hidden_layers=6),
    "bert": masked("BertForMaskedLM", "BertConfig"),
    "roberta": masked("RobertaForMaskedLM", "RobertaConfig"),
    "t5": translator("T5ForConditionalGeneration", "T5Config", d_model=WIDTH, d_kv=16, d_ff=128,
                     num_layers=3, num_heads=4),
    "bart": translator("BartForConditionalGeneration", "BartConfig", d_model=WIDTH,
                       encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
                       decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
                       max_position_embeddings=64),
    "vit": Specimen(_vit, _vit_loss),
    "clip": Specimen(_clip, _clip_loss),
    "whisper": Specimen(_whisper, _whisper_loss),
    "convolutions": Specimen(Convolutions, _image_loss),
    "lstm": Specimen(Recurrent, _letter_loss),
    "borrowing": Specimen(Borrowing, _vector_loss),
    "branching": Specimen(Branching, _vector_loss),
    "lora": _adapted(),
    "checkpointing": _checkpointed(False),
    "reentrant_checkpointing": _checkpointed(True),
    "generating": _generating(),
}
