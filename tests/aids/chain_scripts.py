"""The texts that the chain checkpoint emits, cut into the tokens that carry them.

The next token of the chain is a fixed map of the last one, so a piece stands in one place of one script only. A piece
is never a single byte that a prompt can end with (else that prompt would enter the script in its middle): the single
bytes in use are leading bytes of longer characters, where no text ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass

NUM_LONG_WORDS = 3000
NUM_LOOP_WORDS = 100


@dataclass(frozen=True)
class ChainScript:
    """One scripted answer: a prompt whose last word is `key` is answered by `pieces`, then the end id.

    A script that `loops` goes back to its first piece for ever.
    """

    key: str
    pieces: tuple[bytes, ...]
    loops: bool = False

    @property
    def text(self) -> str:
        """The whole answer (one round of a loop), U+FFFD where its bytes are no UTF-8."""
        return b"".join(self.pieces).decode("utf-8", errors="replace")


def _cut(text: str, lengths: Iterable[int]) -> tuple[bytes, ...]:
    """Cut the UTF-8 bytes of `text` after every next length of `lengths`; the rest is one more piece."""
    data = text.encode()
    pieces = []
    for length in lengths:
        pieces.append(data[:length])
        data = data[length:]
    return (*pieces, data) if data else tuple(pieces)


def _strings(*pieces: str) -> tuple[bytes, ...]:
    return tuple(piece.encode() for piece in pieces)


def _numbered_word(number: int) -> bytes:
    """A word of the long script: paragraphs of fifty words."""
    separator = "" if number == 1 else "\n\n" if number % 50 == 1 else " "
    return f"{separator}word{number}".encode()


HELLO = ChainScript("hello", _strings("Hello", "! I", " am", " the", " chain", " model. ", "Name", " a script."))

# Five characters of four bytes, one with a skin tone, a family joined by zero-width joiners and a flag: no piece is
# whole characters only, some begin and end inside one.
EMOJI = ChainScript(
    "emoji",
    _cut("😀😃🎉🚀👍🏽 family 👨‍👩‍👧 flag 🇫🇷!", (1, 4, 2, 3, 5, 3, 2, 4, 2, 10, 3, 4, 5, 4, 3, 2)),
)
CHINESE = ChainScript(
    "chinese",
    _cut("你好,世界!今天天气很好。我们去公园散步吧。", (1, 4, 2, 3, 5, 2, 4, 7, 2, 3, 5, 4, 3, 2, 4, 6)),
)
SPACES = ChainScript("spaces", _strings("  two", " one", "   three", "     ", "five before this", " \t", "tab", "  "))
LINES = ChainScript("lines", _strings("\n\n", "first line\n", "second line\r\n", "\n\n\n", "last line", "\n \n"))
CODE = ChainScript(
    "code",
    _strings(
        "Here", " is code:\n\n", "```", "python\n", "def ", "add(", "a: int", ", b: int", ") -> int:\n", "    return",
        " a + b\n", "\n\nif __name__ ==", ' "__main__":\n', "        print(", "add(1, 2))\n", "```\n", "It prints `3`.",
    ),
)  # fmt: skip
BRACKETS = ChainScript(
    "brackets",
    _strings(
        "<th", "ink>", "x<", "y</", "think>", " a<b", " && c>", "d <scr", "ipt>ale", "rt('x')</s", "cript> ",
        "<a href=", '"#">li', "nk</a", "> &amp;", " <end>",
    ),
)  # fmt: skip
MARKDOWN = ChainScript(
    "markdown",
    _strings(
        "# Tit", "le\n\n", "**bold", "** and ", "_italic", "_\n\n| a ", "| b |\n", "|---|", "---|\n|", " 1 | 2",
        " |\n\n", "$$x^2", " + y^2", " = z^2$", "$\n\n- it", "em one\n- ", "item two\n",
    ),
)  # fmt: skip
STOP = ChainScript(
    "stop", _strings("before ", "the ST", "OP s", "ign and", " aft", "er it. ENDM", "ARK and more", " words")
)
# Bytes that are no UTF-8: a character cut off in the middle of the answer, another at its end.
BROKEN = ChainScript("broken", (b"cut ", b"\xf0\x9f\x8d", b" here", b" and at the end ", b"\xe4\xbd"))
EMPTY = ChainScript("empty", ())
LONG = ChainScript("long", tuple(_numbered_word(n) for n in range(1, NUM_LONG_WORDS + 1)))
LOOP = ChainScript("loop", tuple(f"tick{n} ".encode() for n in range(NUM_LOOP_WORDS)), loops=True)

DEFAULT = HELLO
SCRIPTS = (HELLO, EMOJI, CHINESE, SPACES, LINES, CODE, BRACKETS, MARKDOWN, STOP, BROKEN, EMPTY, LONG, LOOP)
