"""Text of people and models made safe to render as Markdown: what stands in angle brackets is shown, never run."""

import re

JOINER = "\N{WORD JOINER}"
"""Invisible; it keeps `<`, `&` and `!` from beginning a tag, an entity or an image, in the text and in code alike, and
tells the dollars around mathematics from other dollars. page.js takes it out of all that is copied or edited."""

_FENCE = r"^ {0,3}(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})[\s\S]*?(?:^ {0,3}(?P=fence)[`~]*[ \t]*$|\Z)"
_CODE = r"(?<!`)(?P<ticks>`+)(?!`)(?:(?!\n\n)[\s\S])*?(?<!`)(?P=ticks)(?!`)"
_DISPLAY_MATH = r"\$\$[\s\S]+?\$\$|\\\[(?:(?!\\\[)[\s\S])+?\\\]|\\\((?:(?!\\\()[\s\S])+?\\\)"
# Pandoc's rule, so that prices stay prices: no space inside the dollars, no digit after them.
_INLINE_MATH = r"(?<![\\$\w])\$(?P<math>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\w$])"
# Gradio would draw a block in this language, and complain of each that has not come to its end.
_DRAWING = r"```(?=mermaid)"
_SPECIAL = re.compile(rf"<(?=[A-Za-z/!?])|&(?=[A-Za-z#])|!(?=\[)|{_DRAWING}")
_PARTS = re.compile(
    rf"(?P<verbatim>{_FENCE}|{_DISPLAY_MATH})|(?P<code>{_CODE})|{_INLINE_MATH}|(?P<special>{_SPECIAL.pattern})",
    re.MULTILINE,
)
LATEX_DELIMITERS: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
    {"left": f"${JOINER}", "right": f"{JOINER}$", "display": False},
]


def inert(text: str) -> str:
    """Markdown that renders `text` with code and mathematics, and without any HTML, image or entity."""
    return _PARTS.sub(_part, text)


def original(text: str) -> str:
    """The text that `inert` was given."""
    return text.replace(JOINER, "")


def _part(match: "re.Match[str]") -> str:
    if match["special"]:
        return match["special"] + JOINER
    if match["code"] or match["fence"]:  # in a list a fence may end before its closing line
        return _SPECIAL.sub(lambda special: special[0] + JOINER, match[0])
    return f"${JOINER}{match['math']}{JOINER}$" if match["math"] else match[0]
