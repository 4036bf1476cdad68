"""What limpet-doctor says about one part of the machine."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`fault`: serving fails or is wrong; `note`: it works, but not as one may expect. `advice` says what to do."""

    subject: str
    state: Literal["ok", "note", "fault"]
    text: str
    advice: str = ""

    def lines(self) -> list[str]:
        head = f"{self.state:<6}{self.subject:<14}{self.text}"
        return [head, f"{'':<20}{self.advice}"] if self.advice else [head]
