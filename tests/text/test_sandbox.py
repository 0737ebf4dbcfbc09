"""Templates are foreign code: they neither reach Python nor hang nor fill the memory."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusiongemma.errors import TokenizerError
from diffusiongemma.text import ChatTemplate, default_chat_template

MESSAGES = [{"role": "user", "content": "Hi"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TREE = "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
ENDLESS = {
    "silent loops": LOOP,
    "a loop over a filter": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "a macro that calls itself": "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n }}{% endmacro %}{{ m(60) }}",
    "a recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "loops inside set": "{% set x %}" + LOOP + "{% endset %}",
}
GREEDY = {
    "a long range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "a repeated string": "{{ 'x' * 10000000000 }}",
    "a repeated list": "{{ ([1] * 10000000000) | length }}",
    "a power": "{{ 10 ** 10 ** 10 }}",
    "squares": "{% set n = namespace(x=9 ** 99) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling with +": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling with ~": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "nested lists": TREE + "{{ n.x }}",
    "nested lists with ~": TREE + "{{ n.x ~ 'x' }}",
    "nested JSON": TREE + "{{ n.x | tojson }}",
    "padding": "{{ 'x'.ljust(10000000000) }}",
    "a centred string": "{{ 'x' | center(10000000000) }}",
    "an indent": "{{ ('\n' * 100000) | indent(100000) }}",
    "a format": "{{ '%999999999999d' % 1 }}",
    "a format with *": "{{ '%*d' % (999999999999, 1) }}",
    "a format method": "{{ '{:999999999999}'.format(1) }}",
    "a format in a format": "{{ '{:{}}'.format(1, 999999999999) }}",
    "replace": "{% set s = 'x' * 100000 %}{{ s.replace('x', s) }}",
    "the replace filter": "{% set s = 'x' * 100000 %}{{ s | replace('x', s) }}",
    "join": "{% set s = 'x' * 100000 %}{{ s.join(s) }}",
    "the join filter": "{% set s = 'x' * 100000 %}{{ range(99999) | join(s) }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "much output": "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "lipsum": "{{ lipsum(n=10000000000) }}",
    "an indent of JSON": "{{ [1] | tojson(indent=10000000000) }}",
}
ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "the attr filter": "{{ ('' | attr('__class__')).__mro__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "map": "{{ ([''] | map(attribute='__class__') | first)() }}",
    "the environment": "{{ self.__init__.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.getcwd() }}",
    "a list that changes": "{{ messages.append(1) }}",
    "a private name": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "a private name at once": "{{ namespace(__call__=1) }}",
    "include": "{% include 'tokenizer_config.json' %}",
    "import": "{% import 'os' as os %}",
    "open": "{{ open('x') }}",
    "dict": "{{ dict.__base__.__subclasses__() }}",
}
BROKEN = {
    "an error": "{{ raise_exception('roles must alternate') }}",
    "an undefined name": "{{ nothing.at.all }}",
    "a division": "{{ 1 // 0 }}",
    "a bad type": "{% for x in 3 %}{% endfor %}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_endless_templates_end(source: str) -> None:
    template = ChatTemplate(source)
    template.time_limit = 0.3
    start = time.monotonic()
    with pytest.raises(TokenizerError):
        template.render(MESSAGES)
    assert time.monotonic() - start < 60  # without a limit: hours, or no memory left


@pytest.mark.parametrize("source", [*GREEDY.values(), *ESCAPES.values()], ids=[*GREEDY, *ESCAPES])
def test_greedy_and_escaping_templates_are_refused(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(TokenizerError, match="refuses"):
        ChatTemplate(source).render(MESSAGES)
    assert time.monotonic() - start < 60  # without a limit: hours, or no memory left


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN.keys())
def test_broken_templates(source: str) -> None:
    with pytest.raises(TokenizerError, match="refuses"):
        ChatTemplate(source).render(MESSAGES)


def test_what_is_out_of_reach_prints_as_nothing() -> None:
    """As in Transformers: a name that the sandbox hides is undefined, and an undefined value prints nothing."""
    source = "{{ ''.__class__ }}{{ raise_exception.__globals__ }}{{ messages | attr('__class__') }}{{ dict.__base__ }}"
    assert ChatTemplate(source).render(MESSAGES) == ""


def test_the_message_of_a_template_is_passed_on() -> None:
    with pytest.raises(TokenizerError, match="roles must alternate"):
        ChatTemplate(BROKEN["an error"]).render(MESSAGES)


@pytest.mark.parametrize("source", ["(" * 100_000, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ x | nofilter }}"])
def test_sources_that_cannot_be_compiled(source: str) -> None:
    with pytest.raises(TokenizerError):
        ChatTemplate(source + "{{").render(MESSAGES)


PIECES = [
    "{%",
    "%}",
    "{{",
    "}}",
    "(",
    ")",
    "|",
    "for",
    "range(9)",
    "~",
    "messages",
    "[0]",
    "'",
    "\n",
    "{#",
    "*",
    "loop",
]


@given(data=st.data())
def test_mangled_templates_render_or_raise_our_error(data: st.DataObject) -> None:
    source = default_chat_template()
    for _ in range(data.draw(st.integers(1, 3))):
        at, length = data.draw(st.integers(0, len(source))), data.draw(st.integers(0, 9))
        source = source[:at] + data.draw(st.sampled_from(PIECES) | st.text(max_size=3)) + source[at + length :]
    try:
        template = ChatTemplate(source)
        template.time_limit = 1.0
        assert isinstance(template.render(MESSAGES), str)
    except TokenizerError:
        pass
