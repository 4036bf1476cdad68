"""Text made safe for Markdown."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.webui.inert_text import JOINER, inert, original


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<think>x<y</think>", "<·think>x<·y<·/think>"),
        ("a < b, 1<2, a & b", "a < b, 1<2, a & b"),
        ("&amp; &#60;", "&·amp; &·#60;"),
        ("![x](http://192.0.2.1/)", "!·[x](http://192.0.2.1/)"),
        ("`<b>` and <b>", "`<·b>` and <·b>"),
        ("```html\n<b>\n```\n<i>", "```html\n<·b>\n```\n<·i>"),
        ("~~~\n<b>\n```\n~~~\n<i>", "~~~\n<·b>\n```\n~~~\n<·i>"),
        ("```\n<b> not closed", "```\n<·b> not closed"),
        ("- a\n  ```\n  x\n\n<h1>", "- a\n  ```\n  x\n\n<·h1>"),
        ("```mermaid\ngraph TD;\n```", "```·mermaid\ngraph TD;\n```"),
        ("> ```mermaid\n> x", "> ```·mermaid\n> x"),
        ("PATH=$HOME/bin:$PATH", "PATH=$HOME/bin:$PATH"),
        ("text ```<b>``` text", "text ```<·b>``` text"),
        ("$$a<b$$ \\(a<b\\) \\[a<b\\]", "$$a<b$$ \\(a<b\\) \\[a<b\\]"),
        ("inline $x^2$ here", "inline $·x^2·$ here"),
        ("$5 and $10, 5 $ and 6 $", "$5 and $10, 5 $ and 6 $"),
        ("`$PATH` and `$HOME`", "`$PATH` and `$HOME`"),
    ],
)
def test_tags_entities_and_images_lose_their_meaning_outside_code(text: str, shown: str) -> None:
    assert inert(text).replace(JOINER, "·") == shown


@given(st.text(alphabet="<>&!`~$\\[]() \nab1/"))
def test_the_original_text_comes_back(text: str) -> None:
    assert original(inert(text)) == text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["`", "` ", "$a ", "$$a ", "\\[a ", "\\(a ", "```\n", "<", "![", "~~~ `\n"])
def test_hostile_repetition_takes_no_time_to_speak_of(piece: str) -> None:
    started = time.process_time()
    inert(piece * 20_000)
    assert time.process_time() - started < 30  # quadratic time would be minutes
