"""The controls of the sidebar: model, system prompt, sampling; remembered with the browser's conversations."""

from collections.abc import Mapping
from typing import Any

import gradio as gr

from limpet.client import Options
from limpet.webui.chat import Choices

_DEFAULTS: dict[str, Any] = {
    "model": "",
    "system": "",
    "own_sampling": False,
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 40,
    "repetition_penalty": 1.0,
    "max_tokens": 0,
    "seed": "",
}
_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")


class Controls:
    """Made inside the page's layout; `components` in the order of `_DEFAULTS`."""

    def __init__(self) -> None:
        self.model = gr.Dropdown([], label="Model", visible=False)
        system = gr.Textbox(label="System prompt", lines=2, max_lines=8, placeholder="the model's own")
        with gr.Accordion("Sampling", open=False):
            own = gr.Checkbox(label="Set it here", info="Else the model's own settings are used.")
            with gr.Group(visible=False) as self.group:
                sliders = [
                    gr.Slider(0.0, 2.0, _DEFAULTS["temperature"], step=0.05, label="Temperature"),
                    gr.Slider(0.05, 1.0, _DEFAULTS["top_p"], step=0.01, label="Top-p"),
                    gr.Slider(0, 200, _DEFAULTS["top_k"], step=1, label="Top-k (0: off)"),
                    gr.Slider(0.8, 2.0, _DEFAULTS["repetition_penalty"], step=0.01, label="Repetition penalty"),
                ]
            limit = gr.Slider(0, 8192, 0, step=16, label="Longest answer in tokens (0: no limit)")
            seed = gr.Textbox(label="Seed", placeholder="random", max_lines=1)
        self.components: list[Any] = [self.model, system, own, *sliders, limit, seed]
        own.change(
            lambda shown: gr.update(visible=shown),
            own,
            self.group,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )  # fmt: skip

    @staticmethod
    def read(values: tuple[Any, ...]) -> dict[str, Any]:
        """The components' values by name."""
        return dict(zip(_DEFAULTS, values, strict=True))

    @staticmethod
    def updates(kept: Mapping[str, Any], models: tuple[str, ...]) -> list[Any]:
        """Set the components to what was kept; a model that the server no longer has gives way to its first."""
        values = {**_DEFAULTS, **{name: kept[name] for name in _DEFAULTS.keys() & kept.keys()}}
        return [
            Controls.model_update(values["model"], models),
            *(gr.update(value=values[name]) for name in _DEFAULTS if name != "model"),
        ]

    @staticmethod
    def model_update(chosen: str, models: tuple[str, ...]) -> Any:
        """The list of models, shown if there is a choice."""
        value = chosen if chosen in models else next(iter(models), None)
        return gr.update(choices=list(models), value=value, visible=len(models) > 1)


def choices_from(kept: Mapping[str, Any]) -> Choices:
    """What the controls ask of the next answer; raises ValueError for a seed that is no number."""
    options = Options(max_tokens=int(kept["max_tokens"]) or None, seed=_seed(str(kept["seed"]).strip()))
    if kept["own_sampling"]:
        options.update({name: kept[name] for name in _SAMPLING})  # type: ignore[typeddict-item]
        options["top_k"] = int(kept["top_k"])
    return Choices(model=kept["model"] or "", system=str(kept["system"]).strip(), options=options)


def _seed(text: str) -> int | None:
    if not text:
        return None
    if not text.isdigit() or int(text) >= 2**64:
        raise ValueError(f"The seed is {text!r}; it must be a whole number from 0 to 2^64 - 1, or empty.")
    return int(text)
