"""Classifiers of pairs of texts, and the tokenizers that they read them with."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "is", "grey", "who", "sat", "on", "mat"]
WORDS += ["?", ".", "##s", "was", "not", "a", "true"]


def bert_tokenizer(folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return transformers.AutoTokenizer.from_pretrained(folder)


def classifier_of_pairs(**options: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    names: dict[str, Any] = {"id2label": {0: "False", 1: "True"}, "label2id": {"False": 0, "True": 1}}
    settings = {"vocab_size": len(WORDS), "max_position_embeddings": 24, "pad_token_id": 0} | sizes | names | options
    torch.manual_seed(0)
    return jolted(transformers.BertForSequenceClassification(transformers.BertConfig(**settings)))


def jolted(model: Any) -> Any:
    """Give every weight an ordinary size, those of token types included."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()
