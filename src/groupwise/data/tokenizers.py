"""Tokenizers that the project makes itself, for models that start from random weights.

Each is an ordinary `PreTrainedTokenizerFast`: it is saved and loaded as a Hugging Face folder, has
a chat template, and a pad token that is not its end token.  Encoding and decoding are exact
inverses on every text that the vocabulary covers, spaces included."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError, DataError
from groupwise.utils.files import expanded

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<|end|>", "<unk>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
MARKS = ("<think>", "</think>", "\\boxed{")
"""Single tokens, but not special ones: rewards see them in the decoded text."""

CHARACTERS = string.digits + " \n+-*/=.,()<>{}:;?%" + string.ascii_lowercase
"""What the `arithmetic` tokenizer can write beside `MARKS`."""

PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names of the class that follows tokenizer.json and nothing else."""

TOKENIZER_FILE = "tokenizer.json"
LARGEST_ID = 1 << 24
"""Ids from here on are no vocabulary's; the largest have a million tokens."""

CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}({{"
    " tool.function.parameters.properties | join(', ') }})\n{% endfor %}<|end|>{% endif %}{% for"
    " message in messages %}{% if message.role == 'tool' %}{{ '<|user|><tool_response>' +"
    " message.content + '</tool_response><|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' +"
    " message['content'] }}{% for call in message.tool_calls or [] %}<tool_call>{{ '{\"name\": \"'"
    ' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments if'
    " call.function.arguments is string else call.function.arguments | tojson }}{{ '}</tool_call>'"
    " }}{% endfor %}{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|assistant|>' }}{% endif %}"
)
"""Tools are shown by name and parameters, and called as Qwen's models call theirs."""

IMAGE_BEGIN, IMAGE_END, IMAGE, VIDEO = IMAGE_MARKS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Control tokens of images, by the names that Qwen's models have for them."""
IMAGE_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ '<|' + message['role'] + '|>' + message['content'] }}",
    "{{ '<|' + message['role'] + '|>' }}{% if message['content'] is string %}{{"
    " message['content'] }}{% else %}{% for part in message['content'] %}{% if part.type =="
    " 'image' %}" + IMAGE_BEGIN + IMAGE + IMAGE_END + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}",
)
"""`CHAT_TEMPLATE`, which writes the parts of a message."""


def make_tokenizer(name: str, texts: Iterable[str] = ()) -> PreTrainedTokenizerBase:
    """The tokenizer that `model.scratch.tokenizer` names: `arithmetic`, `bytes`, `bpe:N` (trained
    on `texts`), or a folder.

    Raises ConfigError for anything else, and DataError if `texts` cannot fill a `bpe:N` vocabulary.
    """
    if name == "arithmetic":
        return arithmetic_tokenizer()
    if name == "bytes":
        return byte_tokenizer()
    if name.startswith("bpe:"):
        size = name.removeprefix("bpe:")
        if not size.isdecimal():
            raise ConfigError(
                f"tokenizer {name!r}: write the size of the vocabulary as a number, for example"
                " bpe:2000"
            )
        return bpe_tokenizer(texts, int(size))
    if expanded(name).is_dir():
        return load_tokenizer(str(expanded(name)))
    raise ConfigError(
        f"no tokenizer {name!r}: choose arithmetic, bytes, bpe:N, or the path of a tokenizer folder"
    )


def has_tokenizer(folder: Path) -> bool:
    """True if a model's folder holds some file of a tokenizer, in any of the forms that
    transformers reads.
    """
    names = ("tokenizer*", "*.tiktoken", "vocab.*", "merges.txt", "spiece.model", "sentencepiece*")
    return any(True for name in names for _ in folder.glob(name))


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub name, as it was saved.

    `AutoTokenizer` puts the class of the model's family in the place of a plain tokenizer
    (transformers 5.23: for Qwen2), which then splits text by that family's rules and not by those
    of tokenizer.json: other ids, without an error.  A folder that says that its tokenizer is a
    plain one is believed.

    Raises ConfigError for a damaged tokenizer.json, else OSError or ValueError as transformers
    does.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(path)
    if (folder / TOKENIZER_FILE).is_file():
        check_tokenizer_file(folder / TOKENIZER_FILE)
    config = folder / "tokenizer_config.json"
    plain = config.is_file() and _read_object(config).get("tokenizer_class") in PLAIN
    try:
        if plain:
            return PreTrainedTokenizerFast.from_pretrained(path)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        if type(error) is Exception:  # the package tokenizers has no class of its own
            raise _unreadable(folder / TOKENIZER_FILE, str(error)) from error
        raise


def check_tokenizer_file(file: Path) -> None:
    """Raise ConfigError if a tokenizer.json is no object, or names an id that no token can have."""
    content = _read_object(file)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = []
    if isinstance(vocabulary, dict):
        ids += vocabulary.items()
    for token in content.get("added_tokens") or ():
        if isinstance(token, dict):
            ids.append((token.get("content"), token.get("id")))
    for token, id in ids:
        if type(id) is not int or not 0 <= id < LARGEST_ID:
            raise _unreadable(file, f"the token {token!r} has the id {id!r}")


def _read_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.  Raises ConfigError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, str(error)) from error
    if not isinstance(content, dict):
        raise _unreadable(file, "it holds no JSON object")
    return content


def _unreadable(file: Path, reason: str) -> ConfigError:
    """Make the error for a damaged file of a tokenizer."""
    return ConfigError(f"{str(file)!r} cannot be read: {reason:.300}; copy or fetch it again")


def check_same_tokens(
    ours: PreTrainedTokenizerBase,
    theirs: PreTrainedTokenizerBase,
    whose: str,
    *,
    further: bool = False,
) -> None:
    """Raise ConfigError, with the tokens that differ, unless every id means the same to both.

    whose: of the other tokenizer, for the message.   further: one of them may know more tokens.
    """
    tokens, others = ours.get_vocab(), theirs.get_vocab()
    smaller, larger = sorted((tokens, others), key=len)
    compared = smaller if further else {**larger, **smaller}
    different = []
    for token, id in compared.items():
        if larger.get(token) != id or (not further and smaller.get(token) != id):
            different.append(token)
    if different:
        shown = ", ".join(
            f"{token!r} is {tokens.get(token, 'unknown')} to the policy and"
            f" {others.get(token, 'unknown')} to it"
            for token in sorted(
                different, key=lambda token: smaller.get(token, larger.get(token, 0))
            )[:3]
        )
        raise ConfigError(
            f"{whose} has another vocabulary than the policy ({len(different):,} of {len(larger):,}"
            f" tokens differ: {shown}): take a model of the same family, with the same tokenizer"
        )


def with_chat_template(
    tokenizer: PreTrainedTokenizerBase, template: str | None
) -> PreTrainedTokenizerBase:
    """The same tokenizer; its chat template is `template` (Jinja, or the path of a `.jinja` file)
    unless that is None.

    Raises ConfigError if the file cannot be read.
    """
    if template is None:
        return tokenizer
    if template.endswith(".jinja"):
        try:
            template = expanded(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"model.chat_template: {template!r} cannot be read: {error}"
            ) from error
    tokenizer.chat_template = template
    return tokenizer


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    r"""One token per character, for the built-in tasks; `\boxed{`, `<think>` and `</think>` are
    single tokens.

    >>> tokenizer = arithmetic_tokenizer()
    >>> tokenizer.tokenize(r"<think>4+0=4</think>\boxed{4}")
    ['<think>', '4', '+', '0', '=', '4', '</think>', '\\boxed{', '4', '}']
    >>> messages = [{"role": "user", "content": "4+0"}]
    >>> tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    '<|user|>4+0<|end|><|assistant|>'
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = [PAD, END, UNKNOWN, *ROLES, *MARKS, *CHARACTERS]
    core = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return _wrap(core, unknown=UNKNOWN)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte: covers every text, at the price of length."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = [PAD, END, *ROLES, *MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return _wrap(core)


def bpe_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding with `size` tokens in all, learnt from `texts`; it covers every text,
    because all 256 bytes are tokens.

    The same texts in the same order give the same vocabulary.
    Raises ConfigError if `size` has no room for the bytes and special tokens, DataError if `texts`
    is too small to fill it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + 2 + len(ROLES) + len(MARKS)
    if size < least:
        raise ConfigError(
            f"bpe:{size} is too small: 256 bytes and {least - len(alphabet)} special tokens need"
            f" bpe:{least} or more"
        )
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = [PAD, END, *ROLES, *MARKS]
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    if core.get_vocab_size() < size:
        raise DataError(
            f"the texts give a vocabulary of only {core.get_vocab_size()} tokens: lower bpe:{size}"
            " or give more text"
        )
    return _wrap(core)


def with_image_marks(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokenizer, which has control tokens for images, and a chat template that writes
    them; one that has them is left as it is.

    >>> tokenizer = with_image_marks(arithmetic_tokenizer())
    >>> parts = [{"type": "image"}, {"type": "text", "text": "how many?"}]
    >>> messages = [{"role": "user", "content": parts}]
    >>> tokenizer.apply_chat_template(messages, tokenize=False)
    '<|user|><|vision_start|><|image_pad|><|vision_end|>how many?<|end|>'
    """
    if IMAGE not in tokenizer.get_vocab():
        tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_MARKS)})
        tokenizer.chat_template = IMAGE_CHAT_TEMPLATE
    return tokenizer


def _wrap(core: Tokenizer, unknown: str | None = None) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    # MARKS are matched before the text is cut into characters; `special=False` keeps them when
    # special tokens are skipped.
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, END, *ROLES)]
    )
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
