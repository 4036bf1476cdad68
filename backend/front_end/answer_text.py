"""The text of one answer as it may be shown: detokenized, stop strings held back, counted in tokens."""

from collections.abc import Sequence

from limpet.backend.detokenizer import Detokenizer
from limpet.backend.front_end.stop_strings import StopScanner, StopStrings


class AnswerText:
    """Follows one answer; the strings it returns are for the client, in order."""

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(StopStrings(stop_strings)) if stop_strings else None
        self._num_shown = 0  # characters returned

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete; the text before it has been returned."""
        return self._scanner is not None and self._scanner.found

    @property
    def num_tokens_shown(self) -> int:
        """Tokens of which the complete text has been returned."""
        return self._detokenizer.tokens_within(self._num_shown)

    @property
    def num_tokens_kept(self) -> int:
        """The fewest tokens whose text holds all that has been returned; never fewer than are shown."""
        return max(self._detokenizer.tokens_covering(self._num_shown), self.num_tokens_shown)

    def feed(self, ids: Sequence[int]) -> str:
        """What more can be shown after these tokens."""
        return self._show(self._detokenizer.feed(ids))

    def release(self) -> str:
        """Text that was held back for a stop string which will not come."""
        held = self._scanner.flush() if self._scanner is not None else ""
        self._num_shown += len(held)
        return held

    def finish(self) -> str:
        """Everything that is left at the end, an unfinished character included."""
        return self._show(self._detokenizer.flush()) + self.release()

    def _show(self, text: str) -> str:
        shown = self._scanner.feed(text) if self._scanner is not None else text
        self._num_shown += len(shown)
        return shown
