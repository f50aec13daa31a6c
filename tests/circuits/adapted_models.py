"""Small models with adapters of PEFT, whose trained parameters differ from those of a fresh adapter."""

from typing import Any

import peft
import torch
import transformers

from .family_proof import small

#: PEFT looks at an attribute of transformers' models that warns, and warns of norms.
NOT_OURS = ("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning", "ignore:Unsupported layer type")


def llama(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(small("LlamaConfig", num_key_value_heads=2, attention_bias=True))
    return _with_biases(model).to(dtype)


def gpt2(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return _with_biases(transformers.GPT2LMHeadModel(small("GPT2Config"))).to(dtype)


def _with_biases(model: Any) -> Any:
    """The model with biases that are not zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def adapted(model: Any, config: Any, dtype: torch.dtype | None = torch.float64) -> Any:
    """The model with adapters, whose trained parameters are changed at random."""
    wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    changed(wrapped if dtype is None else wrapped.to(dtype))
    return wrapped


def changed(model: Any, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
