"""Secrets reach no file of a run folder and no message; what others wrote steers no terminal."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import groupwise
from groupwise.cli.commands import main
from groupwise.config.recipes import dump, load_recipe
from groupwise.runs.run import train
from groupwise.utils.json_text import json_line
from groupwise.utils.redaction import redacted, redacted_command
from groupwise.utils.secrets import REDACTED, scrubbed, secret_name
from groupwise.utils.terminal import escaped

NAMES = (
    "hf_token", "hub_token", "apikey", "api_key", "api-key", "apiKey", "API_KEY", "OPENAI_API_KEY", "access_key",
    "aws_secret_access_key", "secret_key", "wandb_api_key", "client_secret", "clientSecret", "password", "db_password", "passwd",
    "passphrase", "credentials", "credential", "private_key", "ssh_key", "signing_key", "authorization", "bearer", "secret", "jwt",
    "session_token", "accessToken", "password2", "api_key_2", "X-Api-Key", "PGPASSWORD", "SSHPASS", "MYSQLPASSWORD", "DBPassword",
    "clientsecret",
)  # fmt: skip
PLAIN = (
    "max_new_tokens", "eos_token", "pad_token", "stop_token", "special_tokens", "tokenizer", "key", "keys", "sort_key", "author",
    "passes", "compass", "tokens_per_microbatch", "secretary", "column", "pass_at", "answer_key", "answers_key", "label_keys",
    "reward_key", "required_keys", "stop_tokens", "control_tokens", "max_observation_tokens", "monkey", "turkey", "hockey",
    "problem_key", "ground_truth_key", "choices_key", "difficulty_key", "language_key", "step_token", "good_token", "answer_token",
    "delimiter_token", "include_special_tokens", "auth_mode", "password_file", "token", "tokens", "cookie", "auth", "pass",
)  # fmt: skip


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("name", NAMES)
def test_names_of_secrets_are_redacted(name: str) -> None:
    assert secret_name(name)
    assert "VALUE" not in json.dumps(redacted({"args": {name: ["VALUE", {"inner": "VALUE"}]}, "x": {name: {"user": "VALUE"}}}))
    assert redacted({"headers": {name: "VALUE", "Accept": "json"}}) == {"headers": {name: REDACTED, "Accept": "json"}}


@pytest.mark.parametrize("name", PLAIN)
def test_names_that_are_not_secrets_are_kept(name: str) -> None:
    assert not secret_name(name)
    assert redacted({name: "text", "n": {name: 3}}) == {name: "text", "n": {name: 3}}


TEXTS = ("https://{}@sentry.io/1", "https://me:p@{}@host", "got (https://me:{}@host:8000/v1): 401")
"""Texts with a password in an address, as arguments of rewards hold them."""
ORDINARY = (
    "The password: nobody knows it. Secret: think before you answer.", "Basic arithmetic questions", "a bearer of news",
    "the tokenizer has no EOS token: set one", "unknown key 'api_key': did you mean args?", "tokens: 512", "max_new_tokens=512",
    "https://host:8000/v1", "Qwen/Qwen3-0.6B", "perplexity-ai/pplx-70b-online", "runs/r/final", "{question}",
    "{prompt} key: {answer}", "Answer in Slovak (sk-SK). 2 + 2 = 4; reply with <answer>4</answer>.", "hf://datasets/org/name@main/d",
    "[INST] {{ messages }} [/INST]", "a = b; c: d", "s3://bucket/folder", "git+ssh://git@github.com/o/r", "task-arithmetic-hard",
    "tokens=10", "pad_token=<pad>", "answer_key=gold", "(?P<secret>[a-z]+)", "password={password}", "token: true",
    "/data/hf_datasets/x.jsonl", "hf_checkpoints", "hf_transfer", "basic JavaScript", "bearer certificates", "sk-learn-tutorial",
    "pass: 0.25", "pass=1", "problem_key=question", "if api_key == other", "answer_key: level_of_difficulty_2",
    "me/opus-mt-en-sk-parallel-2021", "org/pypi-package-descriptions-v1", "http://localhost:8000 and me@host",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_secrets_inside_of_texts_are_redacted(text: str) -> None:
    hidden = text.format(*["LEAK1abcdef"] * 2)
    assert "LEAK" not in json.dumps(redacted({"x": [hidden]}))
    assert "LEAK" not in json.dumps(redacted_command(["train", f"rewards.0.args.x={hidden}"]))
    assert "LEAK" not in scrubbed(f"it was {hidden}")


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_texts_are_kept(text: str) -> None:
    assert redacted({"x": [text]}) == {"x": [text]}
    if text not in ("tokens=10", "pass=1", "password={password}"):  # of a command's arguments, all that has such a name goes
        assert redacted_command(["train", f"data.system={text}"]) == ["train", f"data.system={text}"]


def test_a_secret_in_the_middle_of_a_text_is_none() -> None:
    """Three rules alone: names of keys, values of variables with such names, passwords in addresses."""
    texts = [
        "api_key=LEAK1abcdef",
        "Authorization: Bearer LEAK1abcdef",
        "https://h/x?api_key=LEAK1abcdef",
        "--hf-token LEAK1abcdef",
    ]
    assert redacted({"texts": texts}) == {"texts": texts}


REPEATED = (
    "x=", "a:b:", "http://", "key=", "key:", "key: ", "api_key=token ", "api_key: token=", "password:", "password=", "token=1 ",
    "token:", "cookie:", "bearer ", 'key="', "key='", 'key=\\"', 'key="\\', "://", "a://b:", "a@", "--a ", "--a-", "'a', ",
    "password: a", "password: bearer ", "password='a",
)  # fmt: skip


@pytest.mark.fault(
    "X6g", "texts of 100,000 characters and more that nearly are a secret", "read in time that grows as the text does"
)
@pytest.mark.parametrize(
    "text",
    [
        "https://a:" + "b" * 200_000,
        "a_key=" + "b=" * 100_000,
        *("a" + between * 200_000 for between in (" ", "\\", "-", ".", "=")),
        *(f"password{between}" + "a" * 200_000 for between in (": ", "=", '="', "='", '=\\"')),
        *(unit * (100_000 // len(unit)) for unit in REPEATED),
    ],
    ids=lambda text: f"{text[:12]!r}",
)
def test_no_text_takes_long_to_read(text: str) -> None:
    """The column's name of one row can be one, and a completion in a reward's exception; in quadratic time it took hours."""
    begun = time.process_time()
    assert len(scrubbed(text)) < 2 * len(text)
    assert time.process_time() - begun < 15


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PGPASSWORD", "hunter2xyz"),
        ("PASSPHRASE", "correct horse battery staple"),
        ("DB_PASS", "12345678901234"),
        ("OPENAI_API_KEY", "9f8b3c2d1e0a7b6c"),
        ("GITHUB_TOKEN", "9f8b3c2d1e0a7b6c"),
        ("STRIPE_KEY", "abcdefgh"),
    ],
)
def test_values_of_the_environment_are_hidden(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert value in scrubbed(f"it was {value}.")
    monkeypatch.setenv(name, value)
    assert scrubbed(f"it was {value}.") == f"it was {REDACTED}."


def test_ordinary_lists_are_kept() -> None:
    value = {"columns": ["token", "text"], "stop": ["</s>", "token"], "pairs": [["a", "b"]], "fields": ["secret", "answer"]}
    value |= {"names": ["api_key", "user_id2"], "pass": 0.25}
    assert redacted(value) == value


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("abc é")


@pytest.mark.slow
def test_an_evaluation_gets_a_rewards_plain_arguments_back(
    recipe: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "asked.py").write_text(
        "def judge(completion_ids, problem_key, good_token, api_key, **_):\n"
        "    assert (problem_key, good_token, api_key) == ('question', '<good>', 'LEAK1abcdef'), 'other arguments'\n"
        "    return [float(sum(ids) % 2) for ids in completion_ids]\n"
    )
    args = {"problem_key": "question", "good_token": "<good>", "api_key": "LEAK1abcdef"}
    path = recipe("r", steps=1, rewards=[{"function": "asked.py:judge", "args": args}])
    assert main(["train", str(path), "--quiet"]) == 0
    assert "LEAK" not in everything(Path("runs/r")).decode(errors="replace")
    capsys.readouterr()
    assert main(["eval", "runs/r", "--k", "1", "--limit", "2"]) == 2
    assert "rewards.0.args.api_key" in (told := capsys.readouterr().err)
    assert "as an override" in told
    assert main(["eval", "runs/r", "--k", "1", "--limit", "2", "rewards.0.args.api_key=LEAK1abcdef"]) == 0
    assert main(["train", "runs/r/config.yaml", "--quiet", "name=again"]) == 2
    assert "rewards.0.args.api_key" in capsys.readouterr().err


@pytest.mark.slow
@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner)))
def test_what_is_no_secret_is_left_as_it_is(value: object) -> None:
    assert redacted(value) == value


@pytest.mark.slow
@pytest.mark.fault("X6b", "secrets under 37 names and in 3 texts, in a recipe", "0 of them in the run folder")
def test_x6b_no_secret_of_a_recipe_is_in_the_run_folder(recipe: Callable, tmp_path: Path) -> None:
    hidden = {name: f"VALUE-{place:02}-zz" for place, name in enumerate(NAMES)}
    texts = {f"text{place}": text.format(*["VALUE-1zz"] * 2) for place, text in enumerate(TEXTS)}
    path = recipe("r", steps=1, rewards=[{"function": "judges.py:judge", "args": hidden | texts}])
    for _ in train(load_recipe(path)):
        pass
    found = everything(Path("runs/r"))
    assert b"VALUE-" not in found
    assert REDACTED.encode() in found


OVERRIDES = (
    "rewards=[{function: judges.py:judge, args: {api_key: VALUE-zz}}]",
    "rewards.0.args={api_key: VALUE-zz}",
    "rewards.0.args={credentials: {user: VALUE-zz, list: [VALUE-zz]}}",
    "rewards.0.args={'client_secret': \"VALUE-zz and more\"}",
    "rewards.0.args.hf_token=VALUE-zz",
    "rewards.0.args={api_key: {a: VALUE-zz, b: {c: VALUE-zz}}}",
    "rewards.0.args={password: foo VALUE-zz}",
    "rewards.0.args.headers={Authorization: VALUE-zz}",
    "rewards.0.args.url=https://me:VALUE-zz@host/",
)


@pytest.mark.parametrize("override", OVERRIDES)
def test_no_secret_of_an_override_is_in_a_recipe_or_a_command(override: str, recipe: Callable) -> None:
    path = str(recipe("r", steps=1))
    assert "VALUE-" not in dump(load_recipe(path, [override]))
    assert "VALUE-" not in " ".join(redacted_command(["train", path, override]))


@pytest.mark.slow
@pytest.mark.fault("X6c, X6e", "secrets in overrides, also inside of mappings", "0 of them in the run folder")
def test_x6c_no_secret_of_an_override_is_in_the_run_folder(recipe: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["groupwise", "train", str(recipe("r", steps=1)), *OVERRIDES]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main(arguments[1:]) == 0
    assert b"VALUE-" not in everything(Path("runs/r"))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--task-arg", "api_key=VALUE"], ["--task-arg", f"api_key={REDACTED}"]),
        (["--task-arg=api_key=VALUE"], [f"--task-arg=api_key={REDACTED}"]),
        (["group.beta=0.1", "data.path=a/b.jsonl"], ["group.beta=0.1", "data.path=a/b.jsonl"]),
        (["rollout.stop=['</s>']", "name=tokens"], ["rollout.stop=['</s>']", "name=tokens"]),
    ],
)
def test_commands_are_kept_without_secrets(given: list[str], kept: list[str]) -> None:
    assert redacted_command(given) == kept


@pytest.mark.slow
@pytest.mark.fault(
    "X6f", "a secret of the environment, in the recipe under another name and in a reward's exception", "0 in folder and log"
)
def test_secrets_of_the_environment(
    recipe: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "VALUE-of-the-environment")
    monkeypatch.setenv("AUTH_MODE", "judges.py")
    monkeypatch.setenv("SERVICE_AUTH", "judges")
    monkeypatch.setenv("MAX_TOKENS", "judges.py")  # no secret: the name is a tokenizer's, or a number's
    path = recipe("r", steps=2, rewards=[{"function": "judges.py:judge", "args": {"endpoint": "x VALUE-of-the-environment y"}}])
    steps = train(load_recipe(path))
    next(steps)
    steps.close()
    (tmp_path / "raise").write_text("ValueError('401 for VALUE-of-the-environment')")
    assert main(["train", str(path)]) == 1
    told = "".join(capsys.readouterr())
    assert "401 for [redacted]" in told
    assert "VALUE" not in told
    found = everything(Path("runs/r"))
    assert b"VALUE-" not in found
    assert b"judges.py" in found


# ---------------------------------------------------------------- text of others


HOSTILE = "\x1b]0;pwn\x07\x1b[31mred\x9b2J\u202e\u2028[/oops]"


def harmless(text: str) -> bool:
    return escaped(text, keep="\n\r\t") == text


@pytest.mark.fault(
    "R23/V5", "a reward raises an exception with terminal escapes in its message", "RewardError with the escapes shown"
)
@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_r23_messages_steer_no_terminal(
    debug: list[str], recipe: Callable, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from groupwise.cli import commands

    path = recipe("r", steps=1)
    (tmp_path / "raise").write_text(f"ValueError({HOSTILE!r})")
    monkeypatch.setattr(sys, "argv", ["groupwise", "train", str(path), *debug])
    ends: list[int] = []

    class End(BaseException):
        pass

    def end(code: int) -> None:
        ends.append(code)
        raise End

    monkeypatch.setattr(commands.os, "_exit", end)
    monkeypatch.setattr(commands.threading, "_shutdown", lambda: None)
    monkeypatch.setattr(commands.atexit, "_run_exitfuncs", lambda: None)
    with pytest.raises(End):
        commands.command()
    told = capfd.readouterr().err
    assert ends == [1]
    assert "\\x1b]0;pwn" in told
    assert harmless(told)
    assert ("Traceback" in told) == bool(debug)


@pytest.mark.fault("V5b", "terminal escapes in a log message, a folder's name and a metric's name", "shown as escapes everywhere")
def test_logs_and_lists_steer_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / f"r{HOSTILE.replace('/', '-')}"
    run.mkdir()
    (run / "config.yaml").write_text("")
    assert main(["runs", str(tmp_path)]) == 0
    assert harmless(capsys.readouterr().out)
    with caplog.at_level(logging.WARNING):
        logging.getLogger("groupwise").warning("damaged: %s", run)
    assert harmless(caplog.records[-1].getMessage())
    line = json_line({f"rewards/{HOSTILE}": HOSTILE})
    assert harmless(line.removesuffix("\n"))
    assert json.loads(line) == {f"rewards/{HOSTILE}": HOSTILE}


@pytest.mark.fault(
    "V5c", "a tensor's name with terminal escapes and a secret, quoted by a warning while loading", "escapes, redacted"
)
def test_loggers_of_modules_are_harmless_in_a_library_and_in_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from groupwise.models import loading

    said = f"not used: {HOSTILE} https://me:hf_abcdefghijklmnop@host/"
    with caplog.at_level(logging.WARNING):
        loading.log.warning("%s", said)
        try:
            raise ValueError(said)
        except ValueError:
            loading.log.exception("it failed")
    assert harmless(caplog.text)
    assert "hf_abc" not in caplog.text
    assert "ValueError: not used: \\x1b]0;pwn" in caplog.text
    capsys.readouterr()
    assert main(["runs", str(tmp_path)]) == 0  # from here on, as in a command, also what loggers of plugins say
    capsys.readouterr()
    logging.getLogger("groupwise.somebodys.plugin").warning("%s", said)
    told = capsys.readouterr().err
    assert "not used: \\x1b]0;pwn" in told
    assert harmless(told)
    assert "hf_abc" not in told


def test_every_module_takes_a_harmless_logger() -> None:
    """But `training.passes`, whose one message names numbers alone: a step imports no formatting of messages.

    A library that is silenced by its name is no logger of ours.
    """
    root = Path(groupwise.__file__).parent
    taking = []
    for path in root.rglob("*.py"):
        if re.search(r'getLogger\((?!"bitsandbytes)', path.read_text(encoding="utf-8")):
            taking.append(path.relative_to(root).as_posix())
    assert sorted(taking) == ["training/passes.py", "utils/terminal.py"]
