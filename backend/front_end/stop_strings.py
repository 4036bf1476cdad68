"""Stop strings, matched across token borders: an Aho-Corasick automaton over the characters of the answer."""

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """The automaton of one request's stop strings; immutable, so a match is a state and a position.

    A state's depth is the length of the longest end of the text that may still become a stop string.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self._match = [0]  # length of the longest stop string that ends in this state
        self._fallback = [0]
        for stop in stop_strings:
            self._insert(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def match(self, state: int) -> int:
        """Length of the longest stop string that is complete in this state, 0 if none is."""
        return self._match[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self._match.append(0)
                self._fallback.append(0)
            state = self._next[state][char]
        self._match[state] = len(stop)

    def _link(self) -> None:
        """Breadth first, so that the fallback of a shorter text is known before it is needed."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], char)
                self._match[child] = self._match[child] or self._match[self._fallback[child]]
                waiting.append(child)


class StopScanner:
    """Follows one answer: holds back what may become a stop string, and cuts at the first that is complete."""

    def __init__(self, stop_strings: StopStrings) -> None:
        self._stops = stop_strings
        self._state = 0
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """What can be shown now; after a match (`found`) that is all the text before the stop string."""
        held = self._held + text
        for position, char in enumerate(text, len(self._held) + 1):
            self._state = self._stops.step(self._state, char)
            length = self._stops.match(self._state)
            if length:
                self.found, self._held = True, ""
                return held[: position - length]
        shown = len(held) - self._stops.depth[self._state]
        self._held = held[shown:]
        return held[:shown]

    def flush(self) -> str:
        """The text held back, once it is certain that no stop string follows."""
        held, self._held = self._held, ""
        return held
