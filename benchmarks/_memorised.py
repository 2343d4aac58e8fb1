"""A small model that knows some conversations by heart, so that two trainers sample the same episodes from it.

It is trained here, in seconds, on what the chat template makes of the conversations: Qwen 2.5's, as TRL ships it, over a byte-pair
tokenizer made of the same texts.  At a temperature near 0 it then says what it has learnt, in any engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

COLD = 0.02
"""A temperature at which nothing but the likeliest token is drawn."""
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

Messages = list[dict[str, Any]]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A tool call in a message."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def memorised(
    folder: Path, conversations: Sequence[Messages], tools: Sequence[Callable], *, hidden: int = 64, layers: int = 2
) -> Path:
    """Write a model and its tokenizer that continue every one of these conversations.  Returns the folder."""
    template = (files("trl") / "chat_templates" / "qwen2_5.jinja").read_text()
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    texts = [str(bare.apply_chat_template(one, tools=list(tools), tokenize=False)) for one in conversations]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=640, special_tokens=[PAD, START, END], initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=template)
    rows = [torch.tensor(fast(text)["input_ids"]) for text in texts]
    longest = max(row.numel() for row in rows)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=longest + 1024,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).train()
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    # What the policy says is all that has to be known: behind `assistant`, up to the end of the turn.
    said = torch.zeros_like(labels, dtype=torch.bool)
    opening = torch.tensor(fast(f"{START}assistant\n")["input_ids"])
    for row, marks in zip(ids, said, strict=True):
        inside = False
        for place in range(opening.numel(), row.numel()):
            inside = inside or bool((row[place - opening.numel() : place] == opening).all())
            marks[place] = inside
            inside = inside and int(row[place]) != fast.eos_token_id
    labels = labels.masked_fill(~said, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(1500):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if float(loss.detach()) < 0.003:
            break
    else:
        raise SystemExit(f"the conversations were not learnt: loss {float(loss.detach()):.3f}")
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
