"""What is trained: Hugging Face checkpoints in and out, packed attention for them, adapters,
sharding, heads, scratch models.

In: a folder or hub name.  Out: a `policy.Policy` that takes packed `Batch`es.

- `policy`: a model, its tokenizer and what the library knows of both, as a value.
- `loading`: policies from checkpoints; `streaming` reads them piece by piece.
- `config_checks`: refuses configs that no model can be computed with.
- `gguf`, `gguf_header`, `gguf_config`, `gguf_tokenizer`, `gguf_weights`: GGUF files, converted
  once.
- `gguf_export`, `gguf_metadata`, `gguf_vocabulary`: the way back, a folder as a GGUF file.
- `model_download`: models that come in a Python package.
- `saving`: policies to folders; `quiet`: transformers' messages meanwhile.
- `passes`, `backbone`: a policy's forward pass over packed batches.
- `attention`, `reach`, `rope`, `rope_tables`, `recurrence`: packed streams for unmodified models;
  `masks` switches a model to them.
- `output_head`, `head_form`: what is before the last matrix, and the factor and cap behind it.
- `reward_head`: one number per token.
- `vision`: images in prompts, as embeddings in a stream.
- `layers`: what known families are made of; `fused` runs their blocks in fewer passes,
  `compiled_blocks` as torch.compile makes them.
- `lora`, `lora_dropout`, `moe`, `sharded`: adapters, the balance of experts, sharded weights.
- `quantized`: frozen bases in 4 or 8 bits, under an adapter.
- `fp8_blocks`: blocks whose products run in FP8.
- `splitting`: which models can be split over processes.
- `scratch`, `shape`: small models with random weights, and the numbers of a model.

Nothing here knows rewards, algorithms or runs.
"""
