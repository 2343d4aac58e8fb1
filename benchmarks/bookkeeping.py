"""What long episodes cost beside drawing their tokens: 256 of them, of four turns of 4,000 tokens with a tool call each.

    python benchmarks/bookkeeping.py

No model runs: every turn is random tokens with a call behind them.  Measured is all that stands between two turns: reading the
turn, the tool, the template's suffix (`keep`) or the whole conversation rendered and encoded anew (`split`), the stream, and the
text of the completion at its end.  Processor seconds of this process, of all its threads.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from _machine import save, significant

from groupwise.config.settings import EnvironmentSettings
from groupwise.data.templates import Template
from groupwise.data.tokenizers import bpe_tokenizer
from groupwise.environments.conversation import Stream
from groupwise.environments.tool_episodes import ToolEnvironment
from groupwise.records import Finish, Prompt
from groupwise.runs.environments import make_runtime, tools_of

DOCS = Path(__file__).parent.parent / "docs"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>\n"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '\n<tool_call>\n{"name": "calculate", "arguments": {"expression": "6 * 7"}}\n</tool_call><|im_end|>'
QUESTION = [{"role": "user", "content": "What is six times seven?"}]


def tokenizer_of() -> Any:
    """Byte pairs of the documentation, with the marks and the template of a chat."""
    tokenizer = bpe_tokenizer([page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))], 4096)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def played(past: str, episodes: int, turns: int, length: int) -> dict[str, float]:
    """Seconds of all episodes side by side: of the processor, and on the clock."""
    tokenizer = tokenizer_of()
    settings = EnvironmentSettings(
        tools=("groupwise.environments.playground:calculate",), past=past, max_turns=turns + 1, episode_timeout=1e6
    )
    runtime = make_runtime(settings)
    assert runtime is not None
    template = Template(tokenizer=tokenizer, chat=True, tools=tools_of(runtime))
    environment = ToolEnvironment(runtime, settings, template, (tokenizer.convert_tokens_to_ids("<|im_end|>"),))
    (question,) = template.ask([template.read({"prompt": QUESTION}, "the question")])
    call = tokenizer(CALL, add_special_tokens=False)["input_ids"]
    rng = np.random.default_rng(0)
    plain = np.array([i for i in range(len(tokenizer)) if i not in tokenizer.added_tokens_decoder])
    drawn = [[*rng.choice(plain, length - len(call)).tolist(), *call] for _ in range(turns)]
    logp = [-1.0] * length
    streams = [
        Stream(Prompt(id=f"0/{i}", tokens=question.tokens, text=question.text, messages=tuple(QUESTION)), 0, 1 << 30)
        for i in range(episodes)
    ]
    begun, clock = time.process_time(), time.perf_counter()
    talks = [environment.begin(stream, seed=0) for stream in streams]
    replies = [talk.open() for talk in talks]
    for turn in drawn:
        for stream, reply in zip(streams, replies, strict=True):
            stream.take(reply.result(), 0, limit=1 << 30)
            stream.add(turn, logp, 0)
            stream.end_turn(Finish.EOS)
        replies = [talk.answer() for talk in talks]
    for talk, stream, reply in zip(talks, streams, replies, strict=True):
        stream.take(reply.result(), 0, limit=1 << 30)
        assert all(one.calls[0].result == "42" for one in talk.close(Finish.LENGTH).turns)
        tokenizer.decode(np.array(stream.tokens), skip_special_tokens=True)
    taken = {"processor": time.process_time() - begun, "clock": time.perf_counter() - clock}
    environment.close()
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4000, help="of a turn (default: 4000)")
    options = parser.parse_args()
    total = options.episodes * options.turns * options.tokens
    result: dict[str, Any] = {"episodes": options.episodes, "turns": options.turns, "tokens": options.tokens}
    for past in ("keep", "split"):
        taken = played(past, options.episodes, options.turns, options.tokens)
        rate = 0.01 * total / taken["processor"]
        result[past] = {name: significant(value) for name, value in taken.items()} | {"tokens_per_second_at_1_percent": round(rate)}
        print(f"{past}: {taken['processor']:.1f} s of the processor, {taken['clock']:.1f} s on the clock for {total:,} tokens; "
              f"1 % of a rollout that draws {rate:,.0f} tokens a second")  # fmt: skip
    save("bookkeeping", result)


if __name__ == "__main__":
    main()
