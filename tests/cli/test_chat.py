"""`dgemma chat`: turns, history, commands, and models with and without a chat template."""

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diffusiongemma import ModelConfig
from diffusiongemma.checkpoint import save_model
from diffusiongemma.cli import app
from diffusiongemma.cli.show import Answer, Json
from diffusiongemma.engine import Commit, End, Engine, Event, Metrics
from diffusiongemma.errors import InputError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.text import ChatTemplate
from diffusiongemma.text.bytes import byte_tokenizer
from diffusiongemma.text.chat import default_chat_template

QUICK = ("--steps", "2", "--max-new-tokens", "8", "--seed", "1")


def chat(said: str, *args: str, model: str | Path = "random:tiny") -> Result:
    return CliRunner().invoke(app, ["chat", "--model", str(model), *QUICK, *args], input=said, catch_exceptions=False)


def ends(result: Result) -> list[dict[str, object]]:
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return [event for event in found if event["kind"] == "end"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random network that speaks DiffusionGemma's chat format."""
    folder = tmp_path_factory.mktemp("chat")
    save_model(DiffusionGemma(ModelConfig.preset("tiny")).init_weights(std=0.1), folder)
    (folder / "tokenizer.json").write_text(byte_tokenizer()._full.to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(default_chat_template(), encoding="utf-8")
    return folder


def test_turns_share_their_beginning() -> None:
    first, second = ends(chat("hello\n\nand then?\n", "--json"))
    assert first["metrics"]["reused_tokens"] == 0
    assert second["metrics"]["prompt_tokens"] > len("hello\nand then?\n") + 1
    assert second["metrics"]["reused_tokens"] >= len("hello\n")


def test_a_stop_token_that_never_comes_is_told_at_the_start() -> None:
    with pytest.raises(InputError, match="stop token 600 never comes"):
        chat("", "--stop-token", "600")  # it was told with every turn, and with none not at all


def test_reset_and_quit() -> None:
    once = ends(chat("hello\n", "--json"))
    result = chat("hello\n/reset\nhello\n/quit\nnever asked\n", "--json")
    assert result.exit_code == 0
    assert [e["text"] for e in ends(result)] == [once[0]["text"]] * 2
    assert "forgotten" in result.stderr


def test_a_model_without_a_template_says_so() -> None:
    result = chat("/think\n/help\n/nonsense\n")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "random:tiny has no chat template: it continues the text" in result.stderr
    assert "cannot be told to think" in result.stderr
    assert result.stderr.count("/reset forgets") == 3  # at the start, for /help, and for what it does not know
    for flag in (("--system", "Be brief."), ("--thinking",)):
        with pytest.raises(InputError, match="no chat template"):
            chat("hello\n", *flag)


def test_a_turn_that_fails_leaves_the_conversation() -> None:
    result = chat("x" * 5000 + "\nhello\n", "--json")
    assert result.exit_code == 0
    assert "error: " in result.stderr
    assert [e["text"] for e in ends(result)] == [e["text"] for e in ends(chat("hello\n", "--json"))]


def test_interrupt_ends_the_answer_not_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the first of two blocks: the block stays in the conversation, and the next turn is asked."""

    class Impatient(Json):
        def take(self, event: Event, new_text: str) -> None:
            super().take(event, new_text)
            if isinstance(event, Commit) and event.block == 0:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("diffusiongemma.cli.show.Json", Impatient)
    result = chat("hello\nagain\n", "--json", "--max-new-tokens", "320", "--seed", "2")
    assert result.exit_code == 0
    first, second = ends(result)
    assert first["finish_reason"] == second["finish_reason"] == "cancelled"
    assert second["metrics"]["prompt_tokens"] == len(f"hello\n{first['text']}\nagain\n".encode()) + 1


def test_system_prompt_and_thinking_reach_the_template(checkpoint: Path) -> None:
    def prompt_tokens(*args: str, said: str = "hello\n") -> list[object]:
        return [e["metrics"]["prompt_tokens"] for e in ends(chat(said, "--json", *args, model=checkpoint))]

    template, tokenizer = ChatTemplate.from_pretrained(checkpoint), byte_tokenizer()
    turn = [{"role": "user", "content": "hello"}]
    system = [{"role": "system", "content": "Be brief."}]
    assert prompt_tokens() == [len(template.encode(tokenizer, turn))]
    assert prompt_tokens("--system", "Be brief.", said="/reset\nhello\n") == [
        len(template.encode(tokenizer, system + turn))
    ]
    thinking = len(template.encode(tokenizer, turn, thinking=True))
    assert prompt_tokens("--thinking") == prompt_tokens(said="/think\nhello\n") == [thinking]
    assert prompt_tokens("--thinking", said="/think\nhello\n") == prompt_tokens()


def test_thinking_is_told_apart_from_the_answer(checkpoint: Path) -> None:
    tokenizer = byte_tokenizer()
    written = tokenizer.encode("<|channel>thought\nhm\n<channel|>é STOP x", allow_special=True)
    with Engine.load(checkpoint) as engine:
        answer = Answer(engine, stops=("STOP",))
        half = written.index(tokenizer.encode("é")[0]) + 1  # a block may end inside a character
        told = [answer.take(Commit(0, part, "")) for part in (written[:half], written[half:])]
        told.append(answer.take(End("stop", Metrics())))
    assert "".join(told) == answer.text == "é "
    assert answer.thinking == "hm"
