"""What a browser keeps."""

import json
from typing import Any

from limpet.client import SessionState
from limpet.webui.chat import system_of, with_system
from limpet.webui.library import Libraries, Library, Record


def record(name: str, question: str = "q", updated: float = 0.0) -> Record:
    state = SessionState(
        id=f"session {name}",
        transcript=[{"role": "user", "content": question}, {"role": "assistant", "content": "a"}],
        turns=[0],
        history_tokens=5,
        server_turns=1,
    )
    return Record(id=name, updated=updated, notes=["n"], state=state)


def stored(library: Library) -> Any:
    """Through JSON, as in the browser."""
    return json.loads(json.dumps(library.stored()))


def test_what_is_stored_comes_back_in_a_new_server() -> None:
    library = Libraries().open("b", None)
    library.choices = {"seed": "7"}
    library.put(record("one", "  A question\nover two lines  "))
    again = Libraries().open("b", stored(library))
    assert again.choices == {"seed": "7"}
    assert again.records == library.records
    assert again.records["one"].title == "A question over two lines"


def test_tabs_of_one_browser_share_a_library_from_the_start() -> None:
    libraries = Libraries()
    mine, also_mine, theirs = (libraries.open(browser, None) for browser in ("mine", "mine", "theirs"))
    mine.put(record("one"))
    assert also_mine.records == mine.records
    assert theirs.records == {}
    assert libraries.open("", None).records == libraries.open("", None).records == {}


def test_what_a_closed_tab_left_behind_is_there_when_its_browser_comes_back() -> None:
    libraries = Libraries()
    libraries.open("mine", None).put(record("one"))
    assert set(libraries.open("mine", None).records) == {"one"}


def test_of_two_versions_the_newer_one_holds() -> None:
    library = Library()
    library.put(record("one", "newer"))
    library.merge({"conversations": [{**stored(library)["conversations"][0], "updated": 1.0, "title": "older"}]})
    assert library.records["one"].title == "newer"
    library.merge({"conversations": [{**stored(library)["conversations"][0], "updated": 1e12, "title": "newest"}]})
    assert library.records["one"].title == "newest"


def test_a_deleted_conversation_does_not_come_back_from_another_tab() -> None:
    library = Library()
    library.put(record("one"))
    other_tab = stored(library)
    library.delete("one")
    library.merge(other_tab)
    assert library.records == {}


def test_conversations_without_a_turn_are_not_kept() -> None:
    library = Library()
    library.put(Record())
    assert library.records == {}


def test_the_oldest_conversations_leave_a_full_storage() -> None:
    library = Library()
    for number in range(8):
        library.put(record(str(number), "x" * 500_000))
        library.records[str(number)].updated = float(number)
    kept = [each["id"] for each in stored(library)["conversations"]]
    assert kept == ["7", "6", "5", "4", "3"]


def test_unreadable_storage_counts_as_empty() -> None:
    for value in (None, "x", [], {"version": 99, "conversations": 3}):
        assert Libraries().open("b", value).records == {}


def test_another_system_prompt_moves_the_turns_and_begins_a_new_session() -> None:
    state = record("one").state
    longer = with_system(state, "S")
    assert (system_of(longer), longer["turns"], longer["history_tokens"]) == ("S", [1], None)
    assert longer["transcript"][1:] == state["transcript"]
    assert longer["id"] != state["id"]
    shorter = with_system(longer, "")
    assert (shorter["transcript"], shorter["turns"]) == (state["transcript"], [0])
