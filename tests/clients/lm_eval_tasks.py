"""Tasks of lm-eval on sentences of our own: a loglikelihood of each answer, and an answer of the model's."""

import json
from pathlib import Path

_CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo",
    "Germany": "Berlin", "Russia": "Moscow", "China": "Beijing", "India": "New Delhi", "Brazil": "Brasília",
    "Canada": "Ottawa", "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana", "Greece": "Athens",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Poland": "Warsaw", "Austria": "Vienna",
    "Hungary": "Budapest", "Portugal": "Lisbon", "Ireland": "Dublin", "Turkey": "Ankara", "Iran": "Tehran",
}  # fmt: skip
# Prompt and answer.
ITEMS = [
    *((f"The capital of {country} is", f" {capital}, as everybody knows.") for country, capital in _CAPITALS.items()),
    *((f"{capital} lies in", f" {country}") for country, capital in _CAPITALS.items()),
]
LIKELIHOOD, CHAT = "limpet_likelihood", "limpet_chat"
NUM_CHATS = 3


def write_tasks(folder: Path) -> None:
    """A folder for --include_path."""
    folder.mkdir()
    items = folder / "items.jsonl"
    items.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in ITEMS), "utf-8")
    chats = folder / "chats.jsonl"
    chats.write_text("".join(items.read_text("utf-8").splitlines(keepends=True)[:NUM_CHATS]), "utf-8")
    _write(folder, LIKELIHOOD, items, "loglikelihood", ["perplexity", "acc"])
    _write(
        folder, CHAT, chats, "generate_until", ["exact_match"], generation_kwargs={"until": ["\n"], "max_gen_toks": 8}
    )


def _write(folder: Path, name: str, items: Path, kind: str, metrics: list[str], **more: object) -> None:
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(items)}},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": metric} for metric in metrics],
        "metadata": {"version": 1},
        **more,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task), "utf-8")  # which is YAML too
