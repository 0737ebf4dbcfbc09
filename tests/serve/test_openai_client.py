"""The unchanged `openai` client against a live server: what its users do, and what they do wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from serve.live import EMBEDDED, ENDLESS, HANGS, QUICK, Live, get, random_model, run_async, serving

ASK: list[Any] = [{"role": "user", "content": "12 + 30 ="}]
EXTRA = {"diffusion": QUICK}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.fixture(scope="module")
def live(embedded: Live) -> Live:
    return embedded


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=HANGS) as client:
        yield client


def chat(client: OpenAI, live: Live, **options: Any) -> Any:
    given = {"model": live.model, "messages": ASK, "max_tokens": 12, "seed": 1, "extra_body": EXTRA} | options
    return client.chat.completions.create(**given)


def complete(client: OpenAI, live: Live, **options: Any) -> Any:
    given = {"model": live.model, "prompt": "x = 1", "max_tokens": 12, "seed": 1, "extra_body": EXTRA} | options
    return client.completions.create(**given)


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_models(client: OpenAI, live: Live) -> None:
    (model,) = client.models.list().data
    assert model.id == live.model
    assert client.models.retrieve(live.model).id == live.model
    assert "/" not in model.id  # a folder's path is not told
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_chat(client: OpenAI, live: Live) -> None:
    reply = chat(client, live)
    assert reply.object == "chat.completion"
    assert reply.model == live.model
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.choices[0].message.role == "assistant"
    assert isinstance(reply.choices[0].message.content, str)
    usage = reply.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens <= 12
    assert usage.diffusion["seed"] == 1
    assert usage.diffusion["steps"] >= 1


def test_a_seed_gives_the_same_text_twice_and_another_another(client: OpenAI, live: Live) -> None:
    texts = [chat(client, live, seed=seed, temperature=1.5).choices[0].message.content for seed in (5, 5, 6, 7, 8, 9)]
    assert texts[0] == texts[1]
    if live.model != "nano":  # a trained model may well be sure of its answer
        assert len(set(texts)) > 1


def test_a_fresh_seed_is_told_and_can_be_used_again(client: OpenAI, live: Live) -> None:
    first = chat(client, live, seed=openai.omit)
    again = chat(client, live, seed=first.usage.diffusion["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content


def test_temperature_zero_needs_no_seed_to_repeat_itself(client: OpenAI, live: Live) -> None:
    first, second = (chat(client, live, seed=openai.omit, temperature=0) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content


def test_streaming_adds_up_to_the_whole(client: OpenAI, live: Live) -> None:
    whole = chat(client, live)
    chunks = list(chat(client, live, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    # Usage is only there for those who ask.
    assert all(chunk.choices and chunk.usage is None for chunk in chat(client, live, stream=True))


def test_drafts_do_not_disturb_the_client(client: OpenAI, live: Live) -> None:
    whole = chat(client, live)
    stream = chat(client, live, stream=True, extra_body=EXTRA | {"stream_options": {"include_drafts": True}})
    text, drafts = "", 0
    for chunk in stream:
        drafts += chunk.object == "canvas.draft"
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert drafts == whole.usage.diffusion["steps"]
    assert text == whole.choices[0].message.content


def test_n_choices_count_on_from_the_seed(client: OpenAI, live: Live) -> None:
    several = chat(client, live, n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    for i, choice in enumerate(several.choices):
        assert choice.message.content == chat(client, live, seed=1 + i).choices[0].message.content
    texts = ["", "", ""]
    for chunk in chat(client, live, n=3, stream=True):
        for part in chunk.choices:
            texts[part.index] += part.delta.content or ""
    assert texts == [choice.message.content for choice in several.choices]
    assert several.usage.prompt_tokens == chat(client, live).usage.prompt_tokens  # one prompt, however many choices


def test_stop(client: OpenAI, live: Live) -> None:
    for seed in range(50):  # a text of which something is left when it is cut
        text = complete(client, live, seed=seed, max_tokens=16).choices[0].text
        at = next((i for i, c in enumerate(text) if i and c not in text[:i]), None)
        if at is not None:
            break
    assert at is not None
    for stop in (text[at], [text[at], "\x00\x00"]):
        cut = complete(client, live, seed=seed, max_tokens=16, stop=stop)
        assert cut.choices[0].text == text[:at]
        assert cut.choices[0].finish_reason == "stop"
        streamed = complete(client, live, seed=seed, max_tokens=16, stop=stop, stream=True)
        assert "".join(c.choices[0].text for c in streamed) == text[:at]


def test_max_tokens(client: OpenAI, live: Live) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        options = {"max_tokens": openai.omit} | {name: 3}
        reply = chat(client, live, **options)
        assert reply.usage.completion_tokens <= 3


def test_logprobs(client: OpenAI, live: Live) -> None:
    for seed in range(50):  # an answer that is not empty
        reply = chat(client, live, seed=seed, logprobs=True, top_logprobs=3)
        if reply.choices[0].message.content:
            break
    content = reply.choices[0].logprobs.content
    assert 0 < len(content) <= reply.usage.completion_tokens
    for one in content:
        assert one.logprob <= 0
        assert len(one.top_logprobs) == 3
        assert [t.logprob for t in one.top_logprobs] == sorted((t.logprob for t in one.top_logprobs), reverse=True)
    text = b"".join(bytes(one.bytes or ()) for one in content).decode(errors="replace")
    assert text == reply.choices[0].message.content
    streamed = chat(client, live, seed=seed, logprobs=True, top_logprobs=3, stream=True)
    found = [one for c in streamed if c.choices[0].logprobs for one in c.choices[0].logprobs.content]
    assert [one.logprob for one in found] == [one.logprob for one in content]
    assert chat(client, live).choices[0].logprobs is None


def test_the_twin(client: OpenAI, live: Live) -> None:
    options: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "extra_body": {"diffusion": {"mode": "ar"}}}
    reply = chat(client, live, **options)
    assert reply.usage.diffusion["decoder_forwards"] == 0
    streamed = chat(client, live, stream=True, **options)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == reply.choices[0].message.content


# ---- tools -----------------------------------------------------------------------------------------------------------


def needs_tools(client: OpenAI) -> None:
    if not client.models.list().data[0].abilities["tools"]:
        pytest.skip("this model takes no tools")


def test_a_named_tool_is_called(client: OpenAI, live: Live) -> None:
    needs_tools(client)
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    reply = chat(client, live, tools=TOOLS, tool_choice=choice, max_tokens=40)
    (call, *_) = reply.choices[0].message.tool_calls
    assert call.type == "function"
    assert call.id
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments), dict)
    chunks = list(chat(client, live, tools=TOOLS, tool_choice=choice, max_tokens=40, stream=True))
    streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert (streamed[0].index, streamed[0].function.name) == (0, "get_weather")
    assert streamed[0].function.arguments == call.function.arguments
    # The conversation goes on with the tool's answer.
    messages = [
        *ASK,
        reply.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert chat(client, live, tools=TOOLS, messages=messages).choices[0].message.role == "assistant"


def test_tool_choice(client: OpenAI, live: Live) -> None:
    needs_tools(client)
    required = chat(client, live, tools=TOOLS[:1], tool_choice="required", max_tokens=24).choices[0]
    assert required.message.tool_calls[0].function.name == "get_weather"
    none = chat(client, live, tools=TOOLS, tool_choice="none", max_tokens=24).choices[0]
    assert none.message.tool_calls is None
    assert chat(client, live, tools=TOOLS, tool_choice="required", max_tokens=24).choices[0].finish_reason
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, live, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}})
    assert caught.value.param == "tool_choice"


def test_a_model_without_tools_says_so(client: OpenAI, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    template = live.engine.template
    assert template is not None
    monkeypatch.setattr(template, "sources", {"default": "{{ messages[0]['content'] }}"})
    for given, param in (({"tools": TOOLS}, "tools"), ({"reasoning_effort": "high"}, "reasoning_effort")):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, live, **given)
        assert caught.value.param == param


# ---- completions -----------------------------------------------------------------------------------------------------


def test_completions(client: OpenAI, live: Live) -> None:
    reply = complete(client, live)
    assert reply.object == "text_completion"
    assert "".join(c.choices[0].text for c in complete(client, live, stream=True)) == reply.choices[0].text
    tokens = live.engine.tokenizer.encode("x = 1", add_bos=True)
    assert complete(client, live, prompt=tokens).choices[0].text == reply.choices[0].text


def test_several_prompts(client: OpenAI, live: Live) -> None:
    reply = complete(client, live, prompt=["x = 1", "y"], n=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[2].text == complete(client, live, prompt="y", seed=3).choices[0].text


def test_logprobs_of_completions(client: OpenAI, live: Live) -> None:
    tried = (complete(client, live, seed=seed, logprobs=2).choices[0] for seed in range(50))
    found = next(choice.logprobs for choice in tried if choice.text)
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) > 0
    assert all(value <= 0 for value in found.token_logprobs)
    assert found.text_offset == sorted(found.text_offset)


def test_a_suffix_is_honoured(client: OpenAI, live: Live) -> None:
    options: dict[str, Any] = {
        "prompt": "a = (",
        "suffix": ")\n",
        "max_tokens": 6,
        "extra_body": {"diffusion": {"steps": 3}},
    }
    reply = complete(client, live, **options)
    expected = live.engine.infill("a = (", ")\n", max_new_tokens=6, seed=1, steps=3)
    assert reply.choices[0].text == expected.text
    other = live.engine.infill("a = (", "zzzz", max_new_tokens=6, seed=1, steps=3)
    assert other.score != expected.score  # both sides count
    assert "".join(c.choices[0].text for c in complete(client, live, stream=True, **options)) == expected.text


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"model": "gpt-4"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop.0"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_p": 0.5}, "top_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"store": True}, "store"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"extra_body": {"diffusion": {"stepz": 1}}}, "diffusion.stepz"),
        ({"extra_body": {"diffusion": {"steps": 0}}}, "diffusion.steps"),
        ({"extra_body": {"diffusion": {"mode": "ar", "steps": 3}}}, "diffusion.steps"),
        ({"extra_body": {"diffusion": {"early_stop": False, "stability": 3}}}, "diffusion.stability"),
        ({"extra_body": {"diffusion": {"canvas": 1 << 16}}}, "diffusion.canvas"),
        ({"extra_body": {"diffusion": {"t_min": 0.9, "t_max": 0.5}}}, "diffusion.t_max"),
        ({"temperature": 0.5, "extra_body": {"diffusion": {"t_min": 0.1}}}, "temperature"),
        ({"messages": [{"role": "user", "content": "x " * 200_000}]}, None),
    ],
)
def test_mistakes_are_named(client: OpenAI, live: Live, options: dict[str, Any], param: str | None) -> None:
    kind = openai.NotFoundError if "model" in options else openai.BadRequestError
    with pytest.raises(kind) as caught:
        chat(client, live, **options)
    body: Any = caught.value.body
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    if param is not None:
        assert body["param"] == param, body


def test_a_conversation_that_is_too_long_has_the_code_that_clients_know(client: OpenAI, live: Live) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, live, messages=[{"role": "user", "content": "x " * 20_000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, live, prompt="x " * 20_000)
    assert caught.value.code == "context_length_exceeded"


def test_what_is_not_there_is_named(client: OpenAI, live: Live) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no path /v1/embeddings; /docs has those that there are"):
        client.embeddings.create(model=live.model, input="x")
    response = get(f"{live.url}/v1/chat/completions")
    assert response.status_code == 405
    assert response.json()["error"]["message"] == "/v1/chat/completions takes no GET, only POST"


def test_values_that_mean_the_default_are_accepted(client: OpenAI, live: Live) -> None:
    defaults: dict[str, Any] = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"},
        "top_p": 1, "n": 1, "store": False, "parallel_tool_calls": True, "service_tier": "auto", "user": "me",
        "temperature": 1, "stop": None, "tools": [], "tool_choice": "auto", "reasoning_effort": "none",
    }  # fmt: skip
    assert chat(client, live, **defaults).choices[0].message == chat(client, live).choices[0].message


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 2}, "n"),
        ({"prompt": [1 << 23]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "x", "n": 2}, "n"),
        ({"suffix": "x", "logprobs": 1}, "logprobs"),
        ({"suffix": "x", "stop": "y"}, "stop"),
        ({"suffix": "x", "prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_mistakes_of_completions_are_named(
    client: OpenAI, live: Live, options: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, live, **options)
    assert caught.value.param == param


@pytest.fixture(scope="module")
def narrow() -> Iterator[Live]:
    """One row, a queue of one, a key, little time."""
    with serving(
        model=EMBEDDED or random_model(), batch=1, queue=1, keys=("a-key-of-the-tests",), request_seconds=3.0
    ) as server:
        yield server


def test_errors_that_are_no_mistakes_of_the_request(narrow: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the class of the client that stands for it."""
    options: dict[str, Any] = {"base_url": f"{narrow.url}/v1", "max_retries": 0}
    with OpenAI(api_key="another-key-0123456", **options) as stranger, pytest.raises(openai.AuthenticationError):
        chat(stranger, narrow)
    key = narrow.key or ""
    origin = {"Origin": "https://elsewhere.example"}
    with OpenAI(api_key=key, default_headers=origin, **options) as page, pytest.raises(openai.PermissionDeniedError):
        chat(page, narrow)
    with OpenAI(api_key=key, timeout=HANGS, **options) as client, ThreadPoolExecutor(8) as pool:
        slow = {"max_tokens": 200, "extra_body": {"diffusion": ENDLESS}}
        asked = [pool.submit(chat, client, narrow, **slow) for _ in range(8)]
        errors = [future.exception() for future in asked]
        late = [error for error in errors if isinstance(error, openai.InternalServerError)]
        full = [error for error in errors if isinstance(error, openai.RateLimitError)]
        assert len(late) + len(full) == len(errors)  # what ran, or waited, for too long; and what had no place
        assert {error.status_code for error in late} == {504}
        assert {error.code for error in full} == {"queue_full"}
        assert all(int(error.response.headers["retry-after"]) >= 1 for error in full)
        with pytest.raises(openai.APITimeoutError):
            chat(client.with_options(timeout=0.2), narrow, **slow)
        narrow.wait_idle()

        def broken(*_: Any) -> None:
            raise RuntimeError

        with monkeypatch.context() as patch:
            patch.setattr(narrow.engine.scheduler.runner, "denoise", broken)
            with pytest.raises(openai.InternalServerError) as caught:
                chat(client, narrow)
            assert caught.value.status_code == 503
        # After the stream has begun, an error is an event, which the client raises.
        given = {"diffusion": ENDLESS, "stream_options": {"include_drafts": True}}
        with pytest.raises(openai.APIError) as broke:
            for _ in chat(client, narrow, max_tokens=200, stream=True, extra_body=given):
                pass
        assert broke.value.code == "time_limit"
        # A client that may retry does so, after the time that it was told, and gets its answer.
        object.__setattr__(narrow.server.state.settings, "request_seconds", HANGS)
        with ThreadPoolExecutor(6) as many:
            quick = {"max_tokens": 8, "extra_body": EXTRA}
            patient = client.with_options(max_retries=8)
            found = [many.submit(chat, patient, narrow, **quick) for _ in range(6)]
            assert len({future.result().choices[0].message.content for future in found}) == 1


def test_a_server_that_is_not_there() -> None:
    with (
        OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


# ---- leaving ---------------------------------------------------------------------------------------------------------


def test_leaving_a_stream_stops_the_work(client: OpenAI, live: Live) -> None:
    given = {"diffusion": ENDLESS, "stream_options": {"include_drafts": True}}
    with chat(client, live, max_tokens=200, stream=True, extra_body=given) as stream:
        for i, _ in enumerate(stream):
            if i == 3:
                break
    live.wait_idle()


def test_cancelling_a_call_stops_the_work(live: Live) -> None:
    async def leave() -> None:
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            call = client.chat.completions.create(
                model=live.model, messages=ASK, max_tokens=200, extra_body={"diffusion": ENDLESS}
            )
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.3)

    run_async(leave())
    live.wait_idle()
