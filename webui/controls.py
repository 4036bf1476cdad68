"""The controls of the sidebar: model, system prompt, sampling; remembered with the browser's conversations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr

from limpet.client import Options
from limpet.webui.chat import Choices


@dataclass(frozen=True)
class _Range:
    """A slider's bounds, step and first value; all are integers where the value must be one."""

    low: float
    high: float
    step: float
    default: float
    label: str

    def slider(self) -> gr.Slider:
        return gr.Slider(self.low, self.high, self.default, step=self.step, label=self.label)

    def nearest(self, typed: float | None) -> float:
        """What the browser, too, makes of what stands in the slider's number field when a person leaves it."""
        number = min(max(self.low if typed is None else typed, self.low), self.high)
        return type(self.default)(number)


_SAMPLING = {
    "temperature": _Range(0.0, 2.0, 0.05, 0.8, "Temperature"),
    "top_p": _Range(0.05, 1.0, 0.01, 0.95, "Top-p"),
    "top_k": _Range(0, 200, 1, 40, "Top-k (0: off)"),
    "repetition_penalty": _Range(0.8, 2.0, 0.01, 1.0, "Repetition penalty"),
}
_LIMIT = {"max_tokens": _Range(0, 8192, 16, 0, "Longest answer in tokens (0: no limit)")}
_DEFAULTS: dict[str, Any] = {
    "model": "",
    "system": "",
    "own_sampling": False,
    **{name: each.default for name, each in {**_SAMPLING, **_LIMIT}.items()},
    "seed": "",
}


class Controls:
    """Made inside the page's layout; `components` in the order of `_DEFAULTS`."""

    def __init__(self) -> None:
        self.model = gr.Dropdown([], label="Model", visible=False)
        system = gr.Textbox(label="System prompt", lines=2, max_lines=8, placeholder="the model's own")
        with gr.Accordion("Sampling", open=False):
            info = "Else the model's own settings are used."
            own = gr.Checkbox(label="Set it here", info=info, elem_id="limpet-own")
            with gr.Group(elem_id="limpet-own-sampling"):
                sampling = [each.slider() for each in _SAMPLING.values()]
            limit = [each.slider() for each in _LIMIT.values()]
            seed = gr.Textbox(label="Seed", placeholder="random", max_lines=1)
        self.components: list[Any] = [self.model, system, own, *sampling, *limit, seed]

    @staticmethod
    def read(values: tuple[Any, ...]) -> dict[str, Any]:
        """The components' values by name; a page hardly loaded has None in some."""
        read = dict(zip(_DEFAULTS, values, strict=True))
        for name, each in {**_SAMPLING, **_LIMIT}.items():
            read[name] = each.nearest(read[name])
        return {name: _DEFAULTS[name] if value is None else value for name, value in read.items()}

    @staticmethod
    def updates(kept: Mapping[str, Any], models: tuple[str, ...]) -> list[Any]:
        """Set the components to what was kept."""
        values = {**_DEFAULTS, **{name: kept[name] for name in _DEFAULTS.keys() & kept.keys()}}
        return [
            Controls.model_update(values["model"], models),
            *(gr.update(value=values[name]) for name in _DEFAULTS if name != "model"),
        ]

    @staticmethod
    def model_update(chosen: str | None, models: tuple[str, ...]) -> Any:
        """The list of models, shown if there is a choice; the first one takes the place of one that is not there.

        While the server has not said what it has, the choice stays as it is.
        """
        known = models or tuple(filter(None, [chosen]))
        value = chosen if chosen in known else next(iter(known), None)
        return gr.update(choices=list(known), value=value, visible=len(known) > 1)


def choices_from(kept: Mapping[str, Any]) -> Choices:
    """What the controls ask of the next answer; raises ValueError for a seed that is none."""
    options = Options(max_tokens=kept["max_tokens"] or None, seed=_seed(str(kept["seed"]).strip()))
    if kept["own_sampling"]:
        options.update({name: kept[name] for name in _SAMPLING})  # type: ignore[typeddict-item]
    return Choices(model=kept["model"], system=str(kept["system"]).strip(), options=options)


def _seed(text: str) -> int | None:
    if not text:
        return None
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(2**64))
    if not digits or int(text) >= 2**64:
        raise ValueError("The seed must be a whole number from 0 to 2^64 - 1, or empty: then it is random.")
    return int(text)
